"""Compile the package `toploc` once more, from the sources that its wheel brings, for the PyTorch that is here.

The wheel of 0.1.6 was compiled for an older one: beside PyTorch 2.13 it ends in `undefined symbol:
at::TensorBase::const_data_ptr<float, 0>()`. Its three modules are in one file of sources, so one compilation makes all.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from torch.utils import cpp_extension

MODULES = ("poly", "ndd", "utils")


def main() -> None:
    """Put the modules into the place of the wheel's. Raises SystemExit if there is no compiler or no package."""
    found, compiler = importlib.util.find_spec("toploc"), shutil.which("g++")
    if found is None or found.origin is None or compiler is None:
        sys.exit("this needs the package toploc 0.1.6, installed, and the compiler g++")
    folder = Path(found.origin).parent / "C" / "csrc"
    made = [folder / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}" for name in MODULES]
    # By this macro PyTorch's header brings the conversion of its tensors along.
    command = [compiler, "-w", "-O1", "-shared", "-fPIC", "-std=c++20", "-fopenmp", "-fvisibility=hidden"]
    command += ["-DTORCH_API_INCLUDE_EXTENSION_H", f"-I{sysconfig.get_path('include')}"]
    command += [f"-I{path}" for path in cpp_extension.include_paths()]
    command += [str(folder / "poly.cpp"), "-o", str(made[0])]
    for path in cpp_extension.library_paths():
        command += [f"-L{path}", f"-Wl,-rpath,{path}"]
    subprocess.run([*command, "-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"], check=True, timeout=900)
    for other in made[1:]:
        other.write_bytes(made[0].read_bytes())


if __name__ == "__main__":
    main()
