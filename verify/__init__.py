"""The proof a user can run: `python -m verify`. Uses flash_attn_compat's public face only; never part of the wheel."""
