"""Checks that users run: `flash-attn-compat verify`, or `python -m verify` in a clone. The wheel contains them too.

Uses only flash_attn_compat's public functions; no module of the package imports verify.
"""

COMMAND = "python -m verify" if __name__ == "verify" else "flash-attn-compat verify"
EXTRA = 'pip install "flash-attn-compat[verify]"'
