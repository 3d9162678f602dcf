#!/usr/bin/env python3
"""moesh generate against transformers: transformers_test.py MOESH [SEED] [sampled].

The ids that both find likeliest, for variants of every model with random weights, on meshes of
every kind; texts through the folder's tokenizer; the token that ends a text.
"""

import json
import os
import pathlib
import random
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "models"))
import golden_test  # noqa: E402
import torch  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast  # noqa: E402

MESHES = ["tp=1", "tp=2", "tp=2,ep=2", "tp=4,ep=2,etp=2", "cp=2", "dp_shard=2,ep=2"]
NEW = 24


def moesh(*args):
    return golden_test.run(MOESH, "generate", *args).rstrip("\n")


def open_model(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32,
                                                 attn_implementation="eager")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model.eval()


def greedy(model, ids, use_cache=True):
    out = model.generate(input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)),
                         max_new_tokens=NEW, do_sample=False, use_cache=use_cache)
    return out[0, len(ids):].tolist()


def ids_agree(tmp, seed):
    for number, (name, config) in enumerate(golden_test.VARIANTS.items()):
        # Random weights may repeat one token for ever, which says little: others, then.
        for attempt in range(20):
            torch.manual_seed(seed + number + 1000 * attempt)
            folder = tmp / f"variant{number}_{attempt}"
            golden_test.make(config, folder)
            prompt = torch.randint(96, (9,)).tolist()
            model = open_model(folder)
            wanted = greedy(model, prompt)
            if len(set(wanted)) > 1:
                break
        assert len(set(wanted)) > 1, f"{name}: {wanted} says little"
        # transformers with its own cache, and every time from the beginning.
        assert wanted == greedy(model, prompt, use_cache=False), name
        meshes = golden_test.sampled(MESHES, number, name)
        for mesh in meshes:
            found = moesh(folder, "--prompt-ids", ",".join(map(str, prompt)), "--mesh", mesh,
                          "--max-new-tokens", NEW)
            assert found == ",".join(map(str, prompt + wanted)), f"{name}, {mesh}:\n{found}\n{wanted}"
        print(f"{name}: {NEW} ids on {len(meshes)} meshes", flush=True)


def folder_with_tokenizer(tmp):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|end|>"],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(["the cat sat on the mat and the dog sat too"] * 3, trainer)
    folder = tmp / "words"
    golden_test.make(golden_test.qwen3(vocab_size=tokenizer.get_vocab_size()), folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)
    return folder


def texts_agree(tmp):
    folder = folder_with_tokenizer(tmp)
    tokenizer, model = PreTrainedTokenizerFast.from_pretrained(folder), open_model(folder)
    prompt = "the cat and the dög"
    ids = tokenizer(prompt)["input_ids"]
    wanted = greedy(model, ids)
    found = moesh(folder, "--prompt", prompt, "--max-new-tokens", NEW, "--mesh", "tp=2")
    assert found == tokenizer.decode(ids + wanted, skip_special_tokens=True), found

    # The end of a text is what the folder says, and can be ignored.
    end = wanted[5]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, 95]}))
    stopping = greedy(open_model(folder), ids)
    assert stopping == wanted[:wanted.index(end) + 1], stopping
    given = ["--prompt-ids", ",".join(map(str, ids)), "--max-new-tokens", NEW]
    assert moesh(folder, *given) == ",".join(map(str, ids + stopping))
    assert moesh(folder, *given, "--ignore-eos") == ",".join(map(str, ids + wanted))
    (folder / "generation_config.json").unlink()

    # Without one, it is the tokenizer's: the model is made to say it.
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["eos_token"] = tokenizer.convert_ids_to_tokens(end)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert moesh(folder, *given) == ",".join(map(str, ids + stopping))
    # A tokenizer from elsewhere comes with its own end, whatever lies beside the model.
    elsewhere = tmp / "elsewhere"
    elsewhere.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (elsewhere / name).write_bytes((folder / name).read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {**settings, "eos_token": tokenizer.convert_ids_to_tokens(wanted[0])}))
    for named in (elsewhere, elsewhere / "tokenizer.json"):
        assert moesh(folder, *given, "--tokenizer", named) == ",".join(map(str, ids + stopping))
    print("texts, and where they end", flush=True)


def draws_depend_on_the_seed(tmp):
    folder = folder_with_tokenizer(tmp)

    def draw(seed, *more):
        return moesh(folder, "--prompt-ids", "5,6,7", "--temperature=1", f"--seed={seed}", *more)
    assert draw(1) == draw(1) == draw(1, "--mesh=tp=2,ep=2") != draw(2)
    likeliest = moesh(folder, "--prompt-ids", "5,6,7")
    assert draw(1, "--top-p=1e-9") == likeliest != draw(1)
    print("draws", flush=True)


def checkpoints_are_folders_too(tmp):
    """Bytes as tokens, a run's folder, and an expert bias which the files have no place for."""
    text, at = tmp / "a.txt", tmp / "run"
    text.write_text("abcdefgh" * 400)
    golden_test.run(MOESH, "train", "--model=qwen3_moe:tiny", "--model.vocab_size=300",
                    f"--data.path={text}", "--steps=60", "--data.sequence_length=32",
                    "--moe.load_balance_coeff=0.01", "--optimizer.lr=1e-2", "--checkpoint.enable",
                    f"--checkpoint.folder={at}", f"--metrics.folder={at}")
    said = moesh(at, "--prompt", "abc", "--tokenizer=bytes", "--max-new-tokens=20")
    assert said == "abcdefghabcdefghabcdefg", said
    assert said == moesh(at / "step-00000060", "--prompt", "abc", "--tokenizer=bytes",
                         "--max-new-tokens=20", "--mesh=dp_shard=2,tp=2,ep=2")
    print("a checkpoint of moesh", flush=True)


def mistakes_are_named(tmp):
    def refused(*args):
        done = golden_test.served.run([MOESH, "generate", *args])
        assert done.returncode == 2, (args, done.returncode, done.stdout, done.stderr)
        return done.stderr
    folder = tmp / "plain"
    golden_test.make(golden_test.mixtral(), folder)
    for args, parts in [
            ([], ["generate needs the folder", "usage"]),
            ([tmp / "nowhere", "--prompt=a"], ["there is no", "nowhere"]),
            ([folder / "config.json", "--prompt=a"], ["is not a folder"]),
            ([tmp, "--prompt=a"], ["neither a config.json nor a checkpoint"]),
            ([folder], ["--prompt TEXT or --prompt-ids"]),
            ([folder, "--prompt=a", "--prompt-ids=1"], ["one of them"]),
            ([folder, "--prompt=a"], ["no tokenizer.json", "--tokenizer"]),
            ([folder, "--prompt-ids=1,x"], ["--prompt-ids is '1,x'"]),
            ([folder, "--prompt-ids=1,96"], ["token 96", "vocabulary of 96"]),
            ([folder, "--prompt-ids=1", "--max-new-tokens=0"], ["--max-new-tokens is '0'"]),
            ([folder, "--prompt-ids=1", "--max-new-tokens=65"], ["64 positions"]),
            ([folder, "--prompt-ids=1", "--top-p=2"], ["top-p is 2"]),
            ([folder, "--prompt-ids=1", "--mesh=tp=3"], ["tensor_parallel_degree is 3"]),
            ([folder, "--prompt-ids=1", "--temprature=1"], ["temprature"])]:
        text = refused(*args)
        for part in parts:
            assert part in text, f"no '{part}' in: {text}"
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    assert "no weights" in refused(folder, "--prompt-ids=1")
    print("mistakes", flush=True)


def main():
    numbers = [a for a in sys.argv[2:] if a.isdigit()]
    seed = int(numbers[0]) if numbers else random.randrange(10**6)
    print(f"seed {seed}", flush=True)
    torch.set_num_threads(1)
    for case in (lambda t: ids_agree(t, seed), texts_agree, draws_depend_on_the_seed,
                 checkpoints_are_folders_too, mistakes_are_named):
        with tempfile.TemporaryDirectory() as tmp:
            case(pathlib.Path(tmp))


if __name__ == "__main__":
    MOESH = golden_test.MOESH = os.path.abspath(sys.argv[1])
    golden_test.SAMPLED = "sampled" in sys.argv
    main()
