"""Results files of the models suite: what has to be the same of runs that are put together."""

from __future__ import annotations

from bench.run_files import RunFiles
from bench.run_files import title_of as title_of

SUITE = "models"
FILES = RunFiles(SUITE, ("quick", "seed", "contenders", "seconds_per_case", "rounds", "timm", "transformers"))
merged = FILES.merged
