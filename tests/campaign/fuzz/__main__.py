"""``python -m tests.campaign.fuzz --inputs 100000 --seed N --workers 2``."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from campaign.fuzz.cli import main

    sys.exit(main(sys.argv[1:]))
