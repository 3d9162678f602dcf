#!/usr/bin/env python3
"""Writes a column of Parquet files as JSONL to standard output, for `moesh tokenize`:

    parquet_to_jsonl.py [--field NAME] FILE... |
      moesh tokenize --format jsonl --tokenizer T --out P -

Needs pyarrow. Rows without a text (null) become empty documents, which moesh leaves out and counts.
"""

import argparse
import json
import signal
import sys


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--field", default="text", help="the column (default: text)")
    parser.add_argument("files", nargs="+")
    arguments = parser.parse_args()
    import pyarrow.parquet

    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    for name in arguments.files:
        with pyarrow.parquet.ParquetFile(name) as file:
            columns = file.schema_arrow.names
            if arguments.field not in columns:
                sys.exit(f"{name} has no column '{arguments.field}'; it has {', '.join(columns)}")
            for batch in file.iter_batches(columns=[arguments.field]):
                for text in batch.column(0).to_pylist():
                    if not isinstance(text, (str, type(None))):
                        sys.exit(f"{name}: '{arguments.field}' is not text: {text!r}")
                    # The key that moesh looks for by default.
                    sys.stdout.write(json.dumps({"text": text or ""}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
