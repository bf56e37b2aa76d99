"""Seeded protein families in OpenFold's on-disk layout, so that training can be tried and tested without a download."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from evodsp.synthetic.config import SynthesisConfig

__all__ = ["SynthesisConfig", "synthesize"]


def synthesize(output: Path, config: SynthesisConfig, report: Callable[[str], None] | None = None) -> None:
    """Write the families of `config` below `output`, in OpenFold's layout on disk.

    `mmcif_files/<id>.cif`, `alignments/<id>_A/{bfd_uniclust_hits.a3m, uniref90_hits.sto}`, `fasta/<id>_A.fasta`,
    `chain_data_cache.json`, `mmcif_cache.json`, `train.txt` and `validation.txt` (chain names; the last `held_out` members of
    each family) and a README.md that says what there is and which command made it. Ids are s001, s002, …. `report` is told,
    in a line, of every chain written.

    The same config gives the same bytes on one machine. On another machine the last digits of its linear algebra may lead a
    backbone elsewhere: families of the same kind, not the same atoms.

    Raises UserError if `output` exists and is not an empty folder; nothing is left at `output` if writing fails.
    """
    # Imported late: the command line reads SynthesisConfig for its help, which must not wait for torch.
    from evodsp.synthetic.writers import write_families

    write_families(Path(output), config, report)
