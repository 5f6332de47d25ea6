"""Fetch a Chromium without a window from npm, for a machine that has none, and print the path of its starter.

    export CHROMIUM=$(python tests/browser/fetch_chromium.py)

Linux on x86-64 only: the package @sparticuz/chromium (65 MB, MIT; made for the cloud) brings the browser,
the libraries that a small system lacks, and a font. Pinned by its checksum; kept in this folder, not in git.
Needs npm with node, which unpacks Brotli.
"""

import platform
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "book"))

import vendor  # noqa: E402  # book/vendor.py

CHROMIUM = vendor.Package(
    "@sparticuz/chromium",
    "147.0.0",
    "4ZKeAQQa8up2mt675qSitztLdbQrlf8BKdC5naeap+5Mv1OV1OlJdPoU+EJC/p5sQUJUQmN4r+q5+EhaaOUHpQ==",
    ".chromium-147.0.0",
    r"LICENSE|bin/(chromium|al2023\.tar|fonts\.tar)\.br",
)
FOLDER = Path(__file__).resolve().parent / CHROMIUM.folder
STARTER = FOLDER / "start"
START = f"""#!/bin/sh
export LD_LIBRARY_PATH='{FOLDER}/lib' FONTCONFIG_PATH='{FOLDER}'
exec '{FOLDER}/bin/chromium' "$@"
"""
FONTS = f"""<?xml version="1.0"?>
<fontconfig>
  <dir>{FOLDER}/fonts</dir> <dir>/usr/share/fonts</dir> <cachedir>{FOLDER}/cache</cachedir>
</fontconfig>
"""
UNPACK_BROTLI = """
const fs = require("fs"), zlib = require("zlib");
for (const file of process.argv.slice(1))
    fs.writeFileSync(file.slice(0, -3), zlib.brotliDecompressSync(fs.readFileSync(file)));
"""


def main() -> None:
    """Fetch it unless it is there."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        sys.exit("fetch_chromium.py: only for Linux on x86-64; install Chromium or Google Chrome instead.")
    if not STARTER.is_file():
        with tempfile.TemporaryDirectory() as scratch:
            vendor.unpack(vendor.fetch(CHROMIUM, Path(scratch, "archive")), CHROMIUM, FOLDER)
        packed = sorted((FOLDER / "bin").glob("*.br"))
        subprocess.run(["node", "-e", UNPACK_BROTLI, *map(str, packed)], check=True)
        for archive in (FOLDER / "bin").glob("*.tar"):
            with tarfile.open(archive) as tar:
                tar.extractall(FOLDER, filter="data")
            archive.unlink()
        for file in packed:
            file.unlink()
        (FOLDER / "bin" / "chromium").chmod(0o755)
        (FOLDER / "fonts.conf").write_text(FONTS)  # the package's own names folders of the cloud
        STARTER.write_text(START)
        STARTER.chmod(0o755)
    print(STARTER)


if __name__ == "__main__":
    main()
