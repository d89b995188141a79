"""A build backend that needs nothing installed: it makes a wheel of the package beside it."""

import zipfile
from pathlib import Path

_NAME = "shopworks-1.0"
_METADATA = {
    "METADATA": "Metadata-Version: 2.1\nName: shopworks\nVersion: 1.0\n",
    "WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
}


def build_wheel(directory: str, settings: object = None, metadata: object = None) -> str:
    name = f"{_NAME}-py3-none-any.whl"
    info = f"{_NAME}.dist-info"
    files = {f"{info}/{file}": text for file, text in _METADATA.items()}
    files |= {str(path): path.read_text() for path in (*Path("shopworks").glob("*.py"), *Path("shopcore").glob("*.py"))}
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(Path(directory, name), "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
    return name
