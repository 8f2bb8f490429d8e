"""`espalier serve` that kills workers that stand still for two seconds: `python -m tests.service.hasty_supervisor`."""

from __future__ import annotations

import sys

from service.__main__ import main
from service.processes import supervisor

if __name__ == "__main__":
    supervisor.HUNG_S, supervisor.LOOK_S = 2.0, 0.5
    sys.exit(main())
