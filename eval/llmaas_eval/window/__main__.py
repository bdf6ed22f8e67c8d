"""``python -m llmaas_eval.window``."""

import sys

from llmaas_eval.window.cli import main

sys.exit(main())
