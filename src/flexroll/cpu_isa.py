"""Inductor's question which instruction sets compiler and CPU share, asked once and not in every process.

It builds a small library for each and loads it in a process that imports torch: on a CPU with AVX-512 three of them,
6 s, in every process that compiles (torch/_inductor/cpu_vec_isa.py, 2.9.1 and 2.11; TORCHINDUCTOR_VEC_ISA_OK answers
the first question alone). What loaded once loads again: a mark in the compile cache says so.
"""

from __future__ import annotations

import hashlib
import platform
from functools import wraps
from pathlib import Path
from typing import Any


def remember_checks() -> None:
    """Keep the answer yes of every such check. Where torch asks in another way, nothing changes."""
    from torch._inductor import cpu_vec_isa
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    asked = getattr(cpu_vec_isa.VecISA, "check_build", None)
    fingerprint = getattr(cpu_vec_isa, "_get_isa_dry_compile_fingerprint", None)
    if asked is None or fingerprint is None or hasattr(asked, "__wrapped__"):
        return

    @wraps(asked)
    def check_build(self: Any, code: str) -> bool:
        # The fingerprint is of compiler, torch and flags; torch itself asks the CPU for its flags before it asks this.
        told = "\n".join((fingerprint(self._arch_flags), platform.node(), code))
        mark = Path(cache_dir(), "isa", hashlib.sha256(told.encode()).hexdigest())
        if mark.exists():
            return True
        able = asked(self, code)
        if able:
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
        return able

    cpu_vec_isa.VecISA.check_build = check_build
