"""Offline: logs to tree, node scorers and bundle."""

import sys

from espalier_cli.loading import begin_loading

if sys.argv[:1] == ["-m"]:  # so Python says that it loads `python -m training`, whose `main` calls `end_loading`
    begin_loading()

from espalier.hardware import limit_threads

limit_threads()  # before torch is imported
