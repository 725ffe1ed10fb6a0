"""``python -m tests.architecture`` prints the modules that a load and a save enter."""

import warnings

from .entered import main

warnings.filterwarnings("ignore", "torch.distributed is")
main()
