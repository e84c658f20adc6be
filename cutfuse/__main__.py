"""`python -m cutfuse`: lists the commands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cutfuse import demo, report
from cutfuse.epilogue import __main__ as epilogue
from cutfuse.report import print_lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cutfuse", description=__doc__.partition(": ")[2])
    parser.parse_args(arguments)
    documented = [command.__doc__ or "" for command in (demo, epilogue, report)]
    commands = [text.splitlines()[0].replace("`", "").split(": ", 1) for text in documented]
    commands.append(["python -m bench", "benchmarks, in a clone of the repository"])
    width = max(len(command) for command, _ in commands)
    print_lines([*(f"{command:{width}}  {purpose}" for command, purpose in commands), "Each has --help."])
    return 0


if __name__ == "__main__":
    sys.exit(main())
