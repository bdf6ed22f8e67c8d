"""Entry point of ``python -m llmaas_eval.drafts``."""

import sys

from llmaas_eval.drafts.cli import main

sys.exit(main())
