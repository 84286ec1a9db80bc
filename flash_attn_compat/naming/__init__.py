"""Answering to the name flash_attn: patching a process, installing for good, and letting transformers look.

Importable without torch. How attention is computed stays out.
"""

from flash_attn_compat.naming.patch import patch, patched, unpatch

__all__ = ["patch", "patched", "unpatch"]
