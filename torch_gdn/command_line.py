"""What `python -m torch_gdn` accepts: its commands, their arguments and their help.

This module imports the standard library alone, so that --help and a wrong argument do not wait for PyTorch.
"""

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from torch_gdn import _macs
from torch_gdn._version import __version__

PROGRAM = "python -m torch_gdn"


def parser_of(name: str, description: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"{PROGRAM} {name}".strip(),
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


# ---- values ----------------------------------------------------------------------------------------------------------


def positive(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


def memories(text: str) -> list[int]:
    sizes = text.split(",")
    if len(sizes) < 2 or not all(size.isascii() and size.isdigit() and int(size) > 0 for size in sizes):
        raise argparse.ArgumentTypeError(f"expected the GB of two or more machines, such as 128,64, got {text!r}")
    return [int(size) for size in sizes]


def seconds(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number of seconds, got {text!r}")
    return int(text)


def shape(text: str) -> tuple[int, int, int, int]:
    sizes = text.split(",")
    if len(sizes) != 4 or not all(size.isdigit() and int(size) > 0 for size in sizes):
        raise argparse.ArgumentTypeError(f"expected H,HV,K,V, such as 16,32,128,128, got {text!r}")
    H, HV, K, V = map(int, sizes)
    return H, HV, K, V


def pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"expected a regular expression, got {text!r}: {error}") from error


def folder(text: str) -> Path:
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a folder, got {text!r}")
    return path.resolve()


def file_to_write(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.resolve().parent.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file in a folder that exists, got {text!r}")
    return path


HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def model(text: str) -> str:
    path = Path(text)
    result = path.is_file() or (path / "config.json").is_file()
    if not (result or text in KNOWN_MODELS or (HUB_NAME.fullmatch(text) and not path.exists())):
        raise argparse.ArgumentTypeError(
            f"expected a name on the Hub, a config.json or a folder that has one, got {text!r}"
        )
    return text


def mac(text: str) -> tuple[_macs.Mac, int | None]:
    try:
        return _macs.find(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


# ---- commands --------------------------------------------------------------------------------------------------------

INFO = """\
Prints what a bug report needs: versions, the system and its chip, the ops and the compiled kernels.

    python -m torch_gdn info
    python -m mps_simulator -m torch_gdn info     the same for the simulated device, in a checkout on Linux

Each device also runs both end-to-end ops once on a small input; their results must agree.
"""


def info() -> argparse.ArgumentParser:
    return parser_of("info", INFO)


CHECK = """\
Tests and times torch_gdn on this machine's mps device. The report says which assumption failed, if any.

    python -m torch_gdn check --quick                      on a Mac: meant to take two minutes
    python -m torch_gdn check                              the same, longer times, and every kernel variant compiled
    python -m mps_simulator -m torch_gdn check --quick     on the simulated device, in a checkout on Linux
    python -m torch_gdn check --compare a.json b.json      prints two reports side by side

The steps, in this order:
  facts       the machine, its GPU, macOS, torch and the build
  pytorch     PyTorch's own product and attention, compared with float64 on the CPU
  probes      one tiny kernel per assumption that the kernels rely on
  numbers     every op, and so every kernel, compared with float64 on the CPU; in a checkout the delta rule is also
              compared with FLA's recorded outputs
  times       every op, compared with a copy; decode and prefill, compared with transformers and MLX; a small model; the
              first calls of a process; next to them, what the Mac's memory and launches allow
  not --quick: the fastest prefill algorithm, a very long prompt, a layer under torch.compile, and finally
              the compilation of every kernel variant that models use

The report is written before every step, so a crash of the machine loses no earlier result. A step that fails, crashes
or hangs is a line of the report. If PyTorch has no mps device, the report only describes the machine.
Exit status: 0 if everything passed, 1 if something failed or there is no device.
"""


def check() -> argparse.ArgumentParser:
    result = parser_of("check", CHECK)
    result.add_argument(
        "--json",
        type=file_to_write,
        metavar="FILE",
        default=Path("torch_gdn_report.json"),
        help="where to write the report (%(default)s)",
    )
    result.add_argument(
        "--quick",
        action="store_true",
        help="run less, to take two minutes on a Mac: facts, probes, every op at one size, three recorded cases, some "
        "timings",
    )
    result.add_argument(
        "--compare",
        type=Path,
        nargs=2,
        metavar=("A", "B"),
        help="print two reports side by side instead of running the checks",
    )
    result.add_argument(
        "--only",
        type=pattern,
        action="append",
        default=[],
        metavar="PATTERN",
        help="run only the steps whose name matches this regular expression, such as 'probe', 'seeded l2norm' or "
        "'compile solve_tril'; you can give it more than once",
    )
    result.add_argument(
        "--golden",
        type=folder,
        metavar="DIR",
        help="folder of FLA's recorded outputs; in a checkout, the default is tests/golden. An installed package has "
        "none, and compares every stage with float64 only",
    )
    result.add_argument(
        "--shaders",
        type=folder,
        metavar="DIR",
        help="folder of shader sources to use instead of the package's own, to try a change",
    )
    return result


TUNE = """\
Finds the fastest prefill algorithm on this machine's mps device, and stores the result.

    python -m torch_gdn tune                                on a Mac: some minutes
    python -m mps_simulator -m torch_gdn tune --tokens 8    on the simulated device, whose times mean nothing

`chunk_gated_delta_rule` and `chunk_kda` have three algorithms for a prompt, whose results differ only by rounding:

    chunked        one kernel per stage, all chunks at once, intermediate results in device memory
    fused_chunk    one kernel, chunk by chunk, the state in registers
    recurrent      one kernel, token by token, the state in registers

A call uses the algorithm that was fastest for the nearest shape measured here with the same rule. Without measurements
of the rule a heuristic picks one from counted bytes and published rates. Nobody has measured it on a Mac.
"""
TUNED_TOKENS = (8, 16, 32, 64, 128, 512, 2048, 8192)
TUNED_SHAPES = {  # by rule: H, HV, K, V of models
    "delta_rule": ((16, 32, 128, 128), (16, 64, 128, 128), (16, 16, 128, 128), (30, 30, 96, 192)),
    "kda": ((32, 32, 128, 128),),
}
TUNED_SEQUENCES = (1, 8)


def tune() -> argparse.ArgumentParser:
    result = parser_of("tune", TUNE)
    result.add_argument(
        "--rules",
        choices=TUNED_SHAPES,
        nargs="+",
        default=list(TUNED_SHAPES),
        help="rules to time; times of another rule stay in the file",
    )
    result.add_argument(
        "--shapes", type=shape, nargs="+", metavar="H,HV,K,V", help="head sizes to time; default: those of models"
    )
    result.add_argument(
        "--tokens",
        type=positive,
        nargs="+",
        default=TUNED_TOKENS,
        metavar="T",
        help="sequence lengths to time, in tokens",
    )
    result.add_argument(
        "--sequences",
        type=positive,
        nargs="+",
        default=TUNED_SEQUENCES,
        metavar="N",
        help="numbers of sequences per call to time",
    )
    result.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    result.add_argument(
        "--repeats", type=positive, default=5, metavar="N", help="number of timings per case; the median is used"
    )
    default = "$TORCH_GDN_TUNING_CACHE, else ~/.config/torch_gdn/tuning_cache.json"
    result.add_argument("--file", type=Path, help=f"the file to write; default: {default}")
    return result


FITS = """\
Prints how much memory a model needs in each format of its weights, and the smallest Mac that it fits on.

    python -m torch_gdn fits Qwen/Qwen3.5-35B-A3B
    python -m torch_gdn fits ./my-model --tokens 131072 --requests 4
    python -m torch_gdn fits MODEL --machines 128,64     divides the layers, and prints each machine's command of vLLM
    python -m torch_gdn fits --table                     the table of docs/models.md

MODEL is a name on the Hub, a folder or a config.json. Only the configuration is read: the model is built without
memory, and its parameters are counted. The states and the cache of the requests are part of the sum.
"""
# transformers' default configurations have the sizes of these models.
KNOWN_MODELS = {
    "Qwen3.5-9B": "Qwen3_5TextConfig",
    "Qwen3.5-35B-A3B": "Qwen3_5MoeTextConfig",
    "Qwen3-Next-80B-A3B": "Qwen3NextConfig",
    "OLMo-Hybrid-7B": "OlmoHybridConfig",
}
MODEL_HELP = f"the model: a name on the Hub, a folder, or one of {', '.join(KNOWN_MODELS)}"
FITTED_TOKENS = 32_768


def fits() -> argparse.ArgumentParser:
    result = parser_of("fits", FITS)
    which = result.add_mutually_exclusive_group(required=True)
    which.add_argument("model", nargs="?", type=model, metavar="MODEL", help=MODEL_HELP)
    which.add_argument("--table", action="store_true", help="print the table of docs/models.md")
    result.add_argument(
        "--tokens", type=positive, default=FITTED_TOKENS, help="tokens per request; default: %(default)s"
    )
    result.add_argument(
        "--requests", type=positive, default=1, help="number of concurrent requests; default: %(default)s"
    )
    result.add_argument(
        "--machines", type=memories, help="GB of each of several machines that share the model, such as 128,64"
    )
    return result


EXPECT = """\
Prints the least time that a model can take on a Mac: bounds, not promises.

    python -m torch_gdn expect Qwen3.5-35B-A3B                        on every Mac
    python -m torch_gdn expect ./my-model --mac "M4 Max 128"          on this one, with more figures
    python -m torch_gdn expect Qwen3.5-9B --mac "M1" --tokens 4096    after a prompt of 4,096 tokens

A decoded token cannot take less time than the memory needs for the bytes that it reads and writes, nor less than its
kernel launches take. A prompt cannot take less time than its arithmetic. Only the configuration is read, and, in a
folder, the sizes of the tensors in its safetensors files. Nobody has timed torch_gdn on a Mac yet.
"""


def expect() -> argparse.ArgumentParser:
    result = parser_of("expect", EXPECT)
    result.add_argument("model", type=model, metavar="MODEL", help=MODEL_HELP)
    result.add_argument("--mac", type=mac, metavar="MAC", help='a chip, and perhaps its GB of memory: "M4 Max 128"')
    result.add_argument(
        "--tokens",
        type=positive,
        default=FITTED_TOKENS,
        help="tokens of the prompt, after which a token is decoded; default: %(default)s",
    )
    return result


SERVE = """\
Serves a model with an OpenAI-compatible server, on torch_gdn's kernels.

    python -m torch_gdn serve MODEL                          with vLLM
    python -m torch_gdn serve --engine sglang MODEL          with SGLang
    python -m torch_gdn serve --engine transformers MODEL    with `transformers serve`

Arguments after MODEL go to the server; its own documentation lists them. vLLM and SGLang refuse to start where PyTorch
has no mps device. The documentation, page "Serve a model", says which server to choose and how to install it.

After SIGTERM, running requests have --shutdown-timeout seconds to end, and new ones are refused. The exit status is 0.
"""
SHUTDOWN_TIMEOUT = 30  # seconds
ENGINES = ("vllm", "sglang", "transformers")


def serve() -> argparse.ArgumentParser:
    result = parser_of("serve", SERVE)
    result.add_argument("--engine", choices=ENGINES, default="vllm", help="the server to start; default: %(default)s")
    result.add_argument(
        "--shutdown-timeout",
        type=seconds,
        default=SHUTDOWN_TIMEOUT,
        metavar="SECONDS",
        help="how long running requests may take after SIGTERM; default: %(default)s",
    )
    result.add_argument(
        "--drafts",
        type=drafts,
        metavar="N",
        help="with transformers: tokens that the model's prediction layer drafts in a step, 1 to 16, or auto to draft "
        "where it pays; requests then run one by one; default: none",
    )
    result.add_argument("model", metavar="MODEL", help="the model: a name on the Hub or a folder")
    rest = result.add_argument(
        "rest", nargs=argparse.REMAINDER, metavar="...", help="arguments to pass on to the server"
    )
    rest.required = False  # otherwise Python 3.11 says that they are missing, together with MODEL
    return result


def drafts(text: str) -> int | str:
    if text == "auto" or (text.isdecimal() and 1 <= int(text) <= 16):
        return text if text == "auto" else int(text)
    raise argparse.ArgumentTypeError(f"expected auto or 1 to 16, got {text}")


def shutdown_timeout_in(arguments: Sequence[str], default: int = SHUTDOWN_TIMEOUT) -> tuple[int, list[str]]:
    """Returns the time-out that the arguments of a server ask for, and the other arguments."""
    parser = argparse.ArgumentParser(prog=f"{PROGRAM} serve", add_help=False, allow_abbrev=False)
    parser.add_argument("--shutdown-timeout", "--shutdown_timeout", type=seconds, default=default)
    options, rest = parser.parse_known_args(list(arguments))
    return options.shutdown_timeout, rest


# ---- all of them -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    """A command: what it does, the module whose `main` takes its arguments, and what it accepts."""

    does: str
    module: str
    parser: Callable[[], argparse.ArgumentParser]


COMMANDS = {
    "info": Command(
        "prints versions, the machine, the ops and the kernels: for a bug report", "torch_gdn.tools.info", info
    ),
    "check": Command("tests every kernel on the mps device and writes a report", "torch_gdn_check.__main__", check),
    "tune": Command("finds and stores the fastest prefill algorithm on this machine", "torch_gdn.tools.tune", tune),
    "fits": Command("prints how much memory a model needs, and the Mac that it fits on", "torch_gdn.tools.fits", fits),
    "expect": Command("prints the least time that a model can take on a Mac", "torch_gdn.tools.expect", expect),
    "serve": Command("serves a model with vLLM, SGLang or transformers", "torch_gdn.tools.serve", serve),
}
USAGE = {"check": "check --quick", "fits": "fits MODEL", "expect": "expect MODEL", "serve": "serve MODEL"}
WARMUP = (
    "warmup is a function, not a command, because kernels are compiled for the process that runs them: call "
    "torch_gdn.warmup(model) in your program, after torch_gdn.enable() and once the model is loaded"
)


# Distributions that a plain installation of torch_gdn lacks, and the extra that installs each.
EXTRAS = {"torch_gdn_check": "check", "torch_gdn_engines": "engines"}


def require_distribution(name: str, command: str) -> None:
    """Ends the process if a distribution of EXTRAS is not installed."""
    if find_spec(name) is None:
        sys.exit(
            f"{command}: expected the package {name}, which is not installed here. In a checkout of torch_gdn: "
            f"pip install -e '.[{EXTRAS[name]}]' --no-build-isolation"
        )


def all_commands() -> argparse.ArgumentParser:
    lines = [f"    {PROGRAM} {USAGE.get(name, name):17}{each.does}" for name, each in COMMANDS.items()]
    listed = "\n".join(lines)
    result = parser_of("", f"Runs a command of torch_gdn.\n\n{listed}\n\nEach command takes --help.")
    result.add_argument("--version", action="version", version=f"torch_gdn {__version__}")
    result.add_argument("command", nargs="?", metavar="COMMAND", help="what to do")
    result.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    return result


def split(arguments: Sequence[str]) -> tuple[Command, list[str]]:
    """Returns the command that the arguments name, and the arguments after it.

    Raises:
        SystemExit: 0 after --help, --version and the help for no arguments at all; 2 for a name that is no command's.
    """
    parser, given = all_commands(), list(arguments)
    name = parser.parse_args(given[:1]).command
    if name is None:
        parser.print_help()
        parser.exit()
    if name == "warmup":
        parser.error(WARMUP)
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        parser.error(f"COMMAND: expected {', '.join(COMMANDS)}, got {name!r}{hint}")
    return COMMANDS[name], given[1:]


def is_running() -> bool:
    """Returns whether Python is about to run `python -m torch_gdn`.

    Python imports the package before it runs torch_gdn/__main__.py, and the package imports PyTorch, which takes
    seconds. While Python looks for the module to run, sys.argv[0] is "-m", and sys.orig_argv has the module's name
    before the arguments. So this is False when a program imports torch_gdn.
    """
    return sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv) :][:1] == ["torch_gdn"]


def check_arguments() -> None:
    """Ends the process if its arguments ask for help or are wrong."""
    command, rest = split(sys.argv[1:])
    command.parser().parse_args(rest)
