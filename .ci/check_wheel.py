"""The wheel holds every tracked file of the package and nothing else: no tests, no verify, no forgotten data file."""

import subprocess
import sys
import zipfile

wheel = zipfile.ZipFile(sys.argv[1])
inside = {name for name in wheel.namelist() if ".dist-info/" not in name or name.startswith("flash_attn_compat/")}
listed = subprocess.run(["git", "ls-files", "flash_attn_compat"], check=True, capture_output=True, text=True)
tracked = set(listed.stdout.split())
if inside != tracked:
    sys.exit(f"missing from the wheel: {sorted(tracked - inside)}\nin the wheel by mistake: {sorted(inside - tracked)}")
print(f"{len(inside)} files")
