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
print(f"{len(inside)} files")
