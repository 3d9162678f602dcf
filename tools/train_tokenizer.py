#!/usr/bin/env python3
"""Trains a byte-level BPE tokenizer, with the splits of Qwen3, by the package `tokenizers`.

train_tokenizer.py --vocab-size 2048 --out FOLDER FILE...

FOLDER gets tokenizer.json, and tokenizer_config.json with the token that ends a document (--eos).
--special TOKEN adds others that are never split, such as those around the turns of a chat.
"""

import argparse
import json
import pathlib

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
         r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def train(files, vocab_size, special):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special,
                                  show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train([str(f) for f in files], trainer)
    return tokenizer


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=pathlib.Path, nargs="+")
    parser.add_argument("--vocab-size", type=int, default=32768)
    parser.add_argument("--eos", default="<|endoftext|>", help="ends a document")
    parser.add_argument("--special", action="append", default=[], metavar="TOKEN")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder")
    args = parser.parse_args()
    tokenizer = train(args.files, args.vocab_size, [args.eos, *args.special])
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(args.out / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": args.eos,
                "clean_up_tokenization_spaces": False}
    (args.out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    print(f"{args.out}/tokenizer.json: {tokenizer.get_vocab_size()} tokens")


if __name__ == "__main__":
    main()
