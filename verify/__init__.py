"""The proof a user can run: `flash-attn-compat verify`, or `python -m verify` in a clone. The wheel has it too.

Uses flash_attn_compat's public face only; nothing in the package imports it.
"""

COMMAND = "python -m verify" if __name__ == "verify" else "flash-attn-compat verify"
EXTRA = 'pip install "flash-attn-compat[verify]"'
