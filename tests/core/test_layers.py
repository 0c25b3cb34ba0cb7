"""Layers 0 to 2 need the standard library only: imported alone, none of them pulls in anything heavy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import nevergiveup

HEAVY = ("torch", "numpy", "ray", "httpx", "pydantic", "rich", "transformers", "safetensors", "tyro", "matplotlib")
LAYERS_0_TO_2 = (
    "types", "advantages", "judging", "strategies", "allocators", "objectives", "events",
    "scheduler", "protocols", "metrics", "diagnosis", "rewards", "settings", "task_settings", "loop", "evaluate", "samples",
    "checkpoints",
)  # fmt: skip
SOURCE = Path(nevergiveup.__file__).parent


@pytest.mark.parametrize("module", [name for name in LAYERS_0_TO_2 if (SOURCE / f"{name}.py").exists()])
def test_import_needs_the_standard_library_only(module: str) -> None:
    code = (
        "import sys\n"
        f"import nevergiveup.{module}\n"
        f"found = sorted(set({HEAVY!r}) & set(sys.modules))\n"
        "sys.exit(f'imports {found}' if found else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"nevergiveup.{module} {done.stderr}"
