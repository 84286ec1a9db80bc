"""The package that `import flash_attn` finds under patch() or install.

Its submodules are flash_attn_compat's own module objects, put here by dropin.finder.
"""

import _flash_attn_compat_startup

_INSTALLED_API = None  # install --api writes its value here

_flash_attn_compat_startup.make_package_importable()
_flash_attn_compat_startup.catch_up()
__path__ = _flash_attn_compat_startup.with_other_distributions(__path__)

from flash_attn_compat import settings as _settings  # noqa: E402
from flash_attn_compat.dropin import finder as _finder  # noqa: E402

_flash_attn_compat_api = _settings.value_of(_settings.API) or _INSTALLED_API or "2.8"
__version__ = _settings.API_VERSIONS[_flash_attn_compat_api]
_finder.add_to_meta_path()

from flash_attn.flash_attn_interface import (  # noqa: E402, F401
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

if _flash_attn_compat_api != "2.6":  # flash-attn 2.6 registers no operators
    from flash_attn_compat.dropin import operators as _operators

    _operators.register()
