"""Runs python -m torch_gdn.integrations.transformers serve MODEL --continuous-batching: transformers' own command line
with models on torch_gdn, in continuous batching too.
"""

import sys
from importlib.util import find_spec
from typing import Literal

from torch_gdn.integrations.transformers.switch import enable

SERVING = ("fastapi", "uvicorn", "openai", "accelerate")  # the packages of the extra `serving`


def require_packages() -> None:
    missing = [name for name in SERVING if find_spec(name) is None]
    if missing:
        sys.exit(
            f"transformers serve: {', '.join(missing)}: not installed here. In torch_gdn's checkout: "
            "pip install -e '.[serving]' --no-build-isolation"
        )


def main(drafts: int | Literal["auto"] | None = None) -> None:
    """Runs the command line. With `drafts`, as for `enable`, requests run one by one."""
    if sys.argv[1:2] == ["serve"]:
        require_packages()
    enable(continuous_batching=drafts is None, drafts=drafts)
    from transformers.cli.transformers import main as command

    sys.argv[0] = "transformers"
    command()


if __name__ == "__main__":
    main()
