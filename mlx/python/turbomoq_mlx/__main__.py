"""python -m turbomoq_mlx doctor, or a command of mlx-lm on packed caches: python -m turbomoq_mlx generate --kv best@3 ..."""

import sys

from .commands import main
from .doctor import doctor

if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    command, arguments = sys.argv[1], sys.argv[2:]
    if command == "doctor":
        raise SystemExit(doctor())
    main(command, arguments)
