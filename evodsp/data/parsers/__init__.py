"""Parsers: the text of one file into records. One module for each format; which files a folder holds is `chain_folder`'s.

A parser takes the path and, optionally, the file's bytes if they were read already (from an alignment database); the path
then only names the file in messages. A malformed file is a FileFormatError with file and line.
"""

from evodsp.data.parsers.a3m import parse_a3m
from evodsp.data.parsers.fasta import SUBSTITUTES, FastaRecord, check_name, parse_fasta, read_fasta
from evodsp.data.parsers.hhr import parse_hhr
from evodsp.data.parsers.hmmsearch import parse_hmmsearch
from evodsp.data.parsers.obsolete import parse_obsolete
from evodsp.data.parsers.preparsed import parse_preparsed
from evodsp.data.parsers.stockholm import parse_stockholm

__all__ = [
    "SUBSTITUTES",
    "FastaRecord",
    "check_name",
    "parse_a3m",
    "parse_fasta",
    "parse_hhr",
    "parse_hmmsearch",
    "parse_obsolete",
    "parse_preparsed",
    "parse_stockholm",
    "read_fasta",
]
