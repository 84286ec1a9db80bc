"""The wheel holds every tracked file of the package, verify's modules within it, and nothing else."""

import subprocess
import sys
import zipfile

wheel = zipfile.ZipFile(sys.argv[1])
inside = {name for name in wheel.namelist() if ".dist-info/" not in name or name.startswith("flash_attn_compat/")}
command = ["git", "ls-files", "flash_attn_compat", "verify/*.py"]
listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
tracked = {f"flash_attn_compat/{name}" if name.startswith("verify/") else name for name in listed}
if inside != tracked:
    sys.exit(f"missing from the wheel: {sorted(tracked - inside)}\nin the wheel by mistake: {sorted(inside - tracked)}")
points = next(wheel.read(name).decode() for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt"))
plugin = "[vllm.general_plugins]\nflash_attn_compat = flash_attn_compat.vllm.plugin:register"
if plugin not in points:
    sys.exit(f"vLLM does not find the plugin: {points}")
print(f"{len(inside)} files, and vLLM's plugin")
