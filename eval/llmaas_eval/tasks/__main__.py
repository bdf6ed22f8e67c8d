"""``python -m llmaas_eval.tasks``."""

import sys

from llmaas_eval.tasks.cli import main

sys.exit(main())
