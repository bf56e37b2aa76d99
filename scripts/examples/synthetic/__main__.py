"""`python -m scripts.examples.synthetic --output DIR`: write families of made-up proteins."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from evodsp.argument_parser import OneLineErrors
from evodsp.errors import UserError
from evodsp.files import check_output, output_errors
from evodsp.printing import tell
from scripts.examples.synthetic.config import SynthesisConfig
from scripts.examples.synthetic.writers import synthesize


def main(words: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    parser = OneLineErrors(
        prog="python -m scripts.examples.synthetic",
        usage="python -m scripts.examples.synthetic --output DIR [--option value ...]",
        description="Write synthetic protein families, structures and alignments, to train on without a download. The same "
        "seed gives the same files.",
    )
    parser.add_class_arguments(SynthesisConfig)
    try:
        given = parser.parse_args(list(sys.argv[1:] if words is None else words))
        config = SynthesisConfig(**vars(parser.instantiate_settings(given)))
        check_output(config.output)
        with output_errors(config.output):
            synthesize(config, tell)
    except UserError as error:
        tell(f"synthetic: error: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
