"""Make `import flash_attn` find this package: in a process, in an environment, or in transformers alone.

Importable without torch. Nothing here computes attention.
"""

from flash_attn_compat.dropin.patch import patch, patched, unpatch
from flash_attn_compat.dropin.transformers import register_with_transformers

__all__ = ["patch", "patched", "register_with_transformers", "unpatch"]
