"""How long commands take to start, beside the interpreter and the libraries they stand on."""

import statistics
import subprocess
import sys
import time

COMMANDS = {
    "python": ["-c", "pass"],
    "import torch": ["-c", "import torch"],
    "import regard": ["-c", "import regard"],
    "regard.attend": ["-c", "import regard; regard.attend"],
    "regard --help": ["-m", "regard", "--help"],
    "regard lab": ["-m", "regard", "lab"],
    "regard train translate --help": ["-m", "regard", "train", "translate", "--help"],
}
ROUNDS = 7


def main() -> None:
    took: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(ROUNDS):
        for name, words in COMMANDS.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, *words], check=True, capture_output=True)
            took[name].append(time.perf_counter() - start)
    seconds = {name: statistics.median(times) for name, times in took.items()}
    print("start: seconds more than Python's own, and as a share of what importing torch takes")
    torch = seconds["import torch"] - seconds["python"]
    for name in list(COMMANDS)[1:]:
        more = seconds[name] - seconds["python"]
        print(f"  {name:30s} {more:6.2f}  {more / torch:5.2f}", flush=True)


if __name__ == "__main__":
    main()
