"""flash_attn, answered by flash_attn_compat: the package that `import flash_attn` finds under patch() or install.

Its submodules are flash_attn_compat's own module objects, put here by naming.finder; nothing is computed here.
"""

import _flash_attn_compat_startup

_flash_attn_compat_startup.make_package_importable()
__path__ = _flash_attn_compat_startup.with_other_distributions(__path__)

from flash_attn_compat.naming import finder as _finder  # noqa: E402

_finder.add_to_meta_path()

from flash_attn_compat import FLASH_ATTN_VERSION as __version__  # noqa: E402, F401, I001
from flash_attn.flash_attn_interface import (  # noqa: E402, F401
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

from flash_attn_compat.naming.operators import register as _register  # noqa: E402

_register()
