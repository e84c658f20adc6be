"""Programs in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent  # where Python does not find the source tree, which has no native module


def run_python(*arguments: str, folder: Path = HERE, **environment: str) -> str:
    """What `python ARGUMENTS` prints, started in a folder. Raises AssertionError with all that it wrote if it fails."""
    command = [sys.executable, *arguments]
    given = {**os.environ, **environment}
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder, env=given)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.strip()
