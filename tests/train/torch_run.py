"""What `moesh train` computes, in PyTorch: models of transformers, torch.optim, its schedulers.

Written from what the options say, not from what moesh does. Settings are options of moesh by their
names; texts are read as bytes, with the token 256 after each document. A token is a pair: its id,
and whether it is to be predicted, which a .mask beside a .bin says.
"""

import contextlib
import json
import math
import pathlib
import re
import sys

import numpy as np
import torch
from safetensors.torch import load_file
from torch.optim import lr_scheduler
from transformers import AutoConfig, AutoModelForCausalLM

END, PADDING = 256, -1
AUXILIARY = ("balance_loss", "z_loss", "mtp_loss")


@contextlib.contextmanager
def only_float64():
    """transformers computes norms, softmax and routers in float32 whatever the model's type is."""
    kept = torch.float32, torch.float, torch.Tensor.float, torch.get_default_dtype()
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = kept[:3]
        torch.set_default_dtype(kept[3])


# ---- data


def philox(counter, key):
    """Philox4x32-10 (Salmon et al., 2011)."""
    for _ in range(10):
        p, q = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [q >> 32 ^ counter[1] ^ key[0], q & 0xFFFFFFFF,
                   p >> 32 ^ counter[3] ^ key[1], p & 0xFFFFFFFF]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter


def shuffled(place, size, seed, epoch):
    """What comes at a place of an epoch: a Feistel network over the bits of size."""
    stream = 0xCBF29CE484222325
    for c in f"data: epoch {epoch}".encode():
        stream = (stream ^ c) * 0x100000001B3 % 2**64
    bits = max(3, ((size - 1).bit_length() + 1) // 2)
    while True:
        left, right = place >> bits, place % 2**bits
        for r in range(8):
            b = philox([right, r, stream % 2**32, stream >> 32], [seed % 2**32, seed >> 32])
            left, right = right, left ^ (b[1] << 32 | b[0]) % 2**bits
        place = left << bits | right
        if place < size:
            return place


def documents_of(path):
    if path.suffix == ".bin":
        index = path.with_suffix(".idx").read_bytes()
        lengths = np.frombuffer(index, np.int32, int.from_bytes(index[18:26], "little"), 34)
        tokens = list(zip(np.fromfile(path, np.uint16).tolist(),
                          np.fromfile(path.with_suffix(".mask"), np.uint8).tolist()))
        ends = np.cumsum(lengths)
        return [tokens[end - length:end] for end, length in zip(ends, lengths)]
    text = path.read_text(encoding="utf-8")
    texts = [json.loads(line)["text"] for line in text.splitlines()] if path.suffix == ".jsonl" \
        else [text]
    return [[(token, 1) for token in (*t.encode(), END)] for t in texts]


def cut(documents, length):
    """Sequences of length + 1 (token, document), each beginning with the last token of the one
    before."""
    tokens = [(t, d) for d, ids in enumerate(documents) for t in ids]
    return [tokens[i:i + length + 1] for i in range(0, len(tokens) - length, length)]


def best_fit(documents, length):
    """Pieces of long documents that fill a sequence, then what is left of each document, the
    longest first, where it leaves the least room."""
    whole, rests = [], []
    for ids in documents:
        pieces = [ids[i:i + length + 1] for i in range(0, len(ids) - 1, length)]
        whole += [[p] for p in pieces if len(p) == length + 1]
        rests += [p for p in pieces if len(p) <= length]
    bins = []
    for piece in sorted(rests, key=len, reverse=True):
        rooms = [(length + 1 - sum(map(len, b)), i) for i, b in enumerate(bins)]
        room = min((r for r in rooms if r[0] >= len(piece)), default=None)
        if room:
            bins[room[1]].append(piece)
        else:
            bins.append([piece])
    filled = [[(t, d) for d, piece in enumerate(b) for t in piece] for b in whole + bins]
    return [s + [((0, 0), PADDING)] * (length + 1 - len(s)) for s in filled]


def of_mixture(weights, index, period=10000):
    """Which source sample `index` is of, and which of its samples: always the one that is furthest
    behind its share."""
    shares = [round(w / sum(weights) * period) for w in weights]
    assert sum(shares) == period, "choose weights whose shares are whole"
    taken = [0] * len(weights)
    for n in range(1, index % period + 2):
        behind = [n * s - t * period for s, t in zip(shares, taken)]
        source = behind.index(max(behind))
        taken[source] += 1
    return source, index // period * shares[source] + taken[source] - 1


class Data:
    def __init__(self, paths, weights, settings):
        self.weights, self.settings = weights, settings
        pack = best_fit if settings["data.packing"] == "best_fit" else cut
        self.sources = [pack(documents_of(p), settings["data.sequence_length"]) for p in paths]

    def __getitem__(self, index):
        source, index = of_mixture(self.weights, index)
        sequences = self.sources[source]
        epoch, place = divmod(index, len(sequences))
        if self.settings["data.shuffle"]:
            place = shuffled(place, len(sequences), self.settings["data.seed"], epoch)
        return sequences[place]


# ---- a micro-batch


def new_piece(documents, t, masks):
    return t == 0 or masks and documents[t] != documents[t - 1]


class Ahead:
    def __init__(self, sequences, masks, k):
        self.pieces, self.labels = [], []
        for s in sequences:
            documents = [d for _, d in s]
            for t in range(len(s) - 1):
                if new_piece(documents, t, masks):
                    self.pieces.append([])
                self.pieces[-1].append(s[t + k][0][0] if t + k < len(s) else 0)
                label = -100
                if t + k + 1 < len(s) and {*documents[t:t + k + 2]} == {documents[t]} != {PADDING}:
                    token, is_trained = s[t + k + 1][0]
                    label = token if is_trained else -100
                self.labels.append(label)
        self.labels = torch.tensor(self.labels)
        self.valid = self.labels != -100


class MicroBatch:
    """Sequences of all ranks; a label counts where its token is of the same document, and is to be
    predicted. For `depth` layers of multi-token prediction the tokens k positions later, in the
    pieces as well, and as labels those k + 1 positions later."""

    def __init__(self, sequences, masks, depth=0):
        self.pieces, self.labels, self.sequence = [], [], []
        self.ahead = [Ahead(sequences, masks, k) for k in range(1, depth + 1)]
        for number, s in enumerate(sequences):
            documents = [d for _, d in s]
            for t in range(len(s) - 1):
                if new_piece(documents, t, masks):
                    self.pieces.append([])
                self.pieces[-1].append(s[t][0][0])
                next_id, is_trained = s[t + 1][0]
                goes_on = documents[t] == documents[t + 1] != PADDING
                self.labels.append(next_id if goes_on and is_trained else -100)
                self.sequence.append(number)
        self.labels, self.sequence = torch.tensor(self.labels), torch.tensor(self.sequence)
        self.valid = self.labels != -100


class Norm(torch.nn.Module):
    def __init__(self, dim, eps):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(dim, dtype=torch.float64)), eps

    def forward(self, x):
        return self.weight * x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()


def add_mtp(layer, config):
    """What a layer of multi-token prediction has besides its block, by its names in files."""
    dim = config.hidden_size
    layer.enorm, layer.hnorm = Norm(dim, config.rms_norm_eps), Norm(dim, config.rms_norm_eps)
    layer.eh_proj = torch.nn.Linear(2 * dim, dim, bias=False, dtype=torch.float64)
    layer.shared_head = torch.nn.Module()
    layer.shared_head.norm = Norm(dim, config.rms_norm_eps)


def load(folder):
    """The layers behind the last, which transformers does not know of, are blocks of the model,
    too."""
    config = AutoConfig.from_pretrained(folder)
    stored = {name: tensor for path in pathlib.Path(folder).glob("*.safetensors")
              for name, tensor in load_file(path).items()}
    # transformers writes the field into every config.json.
    has_mtp = f"model.layers.{config.num_hidden_layers}.eh_proj.weight" in stored
    depth = config.num_nextn_predict_layers if has_mtp else 0
    config.num_hidden_layers += depth
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types + config.layer_types[-1:] * depth
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float64,
                                                 attn_implementation="eager")
    last = model.model.layers[len(model.model.layers) - depth:]
    for number, layer in enumerate(last, len(model.model.layers) - depth):
        add_mtp(layer, config)
        for part in ("enorm", "hnorm", "eh_proj", "shared_head"):
            for name, p in getattr(layer, part).named_parameters():
                p.data.copy_(stored[f"model.layers.{number}.{part}.{name}"])
    return model, list(last)


class Model:
    """A model of transformers, and what its routers said in the last forward."""

    def __init__(self, folder):
        self.model, self.mtp = load(folder)
        self.model.set_experts_implementation("eager")
        with only_float64():
            self.model.model.rotary_emb = type(self.model.model.rotary_emb)(self.model.config)
        c = self.model.config
        self.top_k = c.num_experts_per_tok
        # What the balance loss takes of the logits: MiniMax's library the softmax, too.
        self.is_sigmoid = c.model_type in (
            "deepseek_v3", "glm4_moe", "glm4_moe_lite", "llama4_text")
        self.routers = [m for m in self.model.modules() if "Router" in type(m).__name__]
        self.logits, self.chosen = {}, {}
        self.given = None  # [layers, tokens, k]: experts of the next forward; -1: the router's own
        self.forced = {}
        self.largest = {}  # by layer: the largest logit of attention of each head, in training
        self.queries = None
        self.watch_logits()
        self.bias = []
        biases = {getattr(m, "gate", m): m.e_score_correction_bias  # the layer's, of MiniMax
                  for m in self.model.modules() if hasattr(m, "e_score_correction_bias")}
        for layer, router in enumerate(self.routers):
            bias = biases.get(router)
            added = 0  # where the router adds its bias
            if bias is None:  # of a model that has none
                added = bias = torch.zeros(router.num_experts, dtype=torch.float64)
            self.choose_with(layer, router, added)
            self.bias.append(bias)
            router.register_forward_hook(
                lambda _, inputs, out, layer=layer: self.keep(layer, out))

    def watch_logits(self):
        modeling = sys.modules[type(self.model).__module__]
        attention = modeling.eager_attention_forward
        attention = getattr(attention, "unwatched", attention)

        def watched(module, query, key, value, attention_mask, scaling, **options):
            if self.queries is not None and torch.is_grad_enabled():
                keys = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
                seen = (attention_mask == 0) & self.queries[:, None, :, None]
                logits = (query @ keys.transpose(2, 3) * scaling).detach()
                largest = logits.masked_fill(~seen, -math.inf).amax((0, 2, 3))
                before = self.largest.get(module.layer_idx, largest)
                self.largest[module.layer_idx] = torch.maximum(before, largest)
            return attention(module, query, key, value, attention_mask, scaling, **options)

        watched.unwatched = attention
        modeling.eager_attention_forward = watched

    def choose_with(self, layer, router, bias):
        """Its top-k is that of what it looks at and the bias, or what is forced; the values are
        without bias."""
        forward, topk, method = router.forward, torch.topk, torch.Tensor.topk

        def other(x, k, dim=-1, **options):
            if x.dim() != 2 or x.shape[-1] != router.num_experts:  # of groups
                return topk(x, k, dim=dim, **options)
            indices = topk(x + bias, k, dim=dim, **options)[1]
            if layer in self.forced:
                forced = self.forced[layer]
                indices = torch.where(forced < 0, indices, forced)
            return x.gather(dim, indices), indices

        def chosen(*inputs):
            torch.topk = torch.Tensor.topk = other
            try:
                return forward(*inputs)
            finally:
                torch.topk, torch.Tensor.topk = topk, method

        router.forward = chosen

    def keep(self, layer, out):
        if len(out) == 2:  # Llama 4: scores, 0 where an expert is not chosen, and logits
            scores, logits = out
            chosen = scores > 0
        else:
            logits, _, indices = out
            chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, indices, True)
        self.logits[layer], self.chosen[layer] = logits, chosen

    def hidden(self, layers, norm, **inputs):
        """What the head reads behind these layers."""
        inner = self.model.model
        kept = inner.layers, inner.norm
        inner.layers, inner.norm = torch.nn.ModuleList(layers), norm
        try:
            with only_float64():
                return inner(use_cache=False, **inputs).last_hidden_state
        finally:
            inner.layers, inner.norm = kept

    def forward(self, batch):
        """Every piece by itself, as if there were no other: what is behind its end it does not see.
        Logits of the tokens, those of each depth of multi-token prediction behind them, and of the
        routers: [layers, tokens, experts]. At depth k (DeepSeek-V3, section 2.2)

            h'_i = M [RMSNorm(h_i); RMSNorm(Emb(t_(i+k)))],  h = TRM(h'),  P_(i+k+1) = Head(h_i)

        where h_i is what the head has read at depth k - 1; M has the embedding first in files."""
        longest = max(map(len, batch.pieces))
        counts = torch.tensor([t < len(p) for p in batch.pieces for t in range(longest)])

        def padded(pieces):
            return torch.tensor([p + [0] * (longest - len(p)) for p in pieces])

        self.queries = counts.view(len(batch.pieces), longest)
        self.forced = {}
        for layer in range(len(self.routers) if self.given is not None else 0):
            self.forced[layer] = torch.full((len(counts), self.top_k), -1)
            self.forced[layer][counts] = self.given[layer]
        inner = self.model.model
        main = inner.layers[:len(inner.layers) - len(self.mtp)]
        h = self.hidden(main, inner.norm, input_ids=padded(batch.pieces))
        scale = getattr(self.model.config, "logits_scaling", 1)  # of Granite
        logits = [self.model.lm_head(h).flatten(0, 1)[counts] / scale]
        for layer, ahead in zip(self.mtp, batch.ahead):
            embedded = inner.embed_tokens(padded(ahead.pieces))
            x = layer.eh_proj(torch.cat([layer.enorm(embedded), layer.hnorm(h)], -1))
            h = self.hidden([layer], layer.shared_head.norm, inputs_embeds=x)
            logits.append(self.model.lm_head(h).flatten(0, 1)[counts])
        self.queries = None  # other models of this family are not watched
        of_layers = [(self.logits[i][counts], self.chosen[i][counts])
                     for i in range(len(self.routers))]
        return logits, of_layers


def balance_loss(logits, probabilities, top_k, num_step_tokens):
    """E / (K T^2) sum_e n_e sum_t p_te of T tokens, times T / num_step_tokens; n_e of them have
    expert e among their k best, without bias and groups."""
    num_tokens, num_experts = logits.shape
    if num_tokens == 0:
        return 0
    counts = torch.bincount(logits.topk(top_k)[1].flatten(), minlength=num_experts)
    sums = (counts * probabilities.sum(0)).sum()
    return num_experts / (top_k * num_tokens) * sums / num_step_tokens


def loss_sum(logits, labels):
    return torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")


def losses_of(model, batch, settings, num_step_tokens):
    """The parts of the loss, and how many tokens chose each expert, by layer."""
    (logits, *further), of_layers = model.forward(batch)
    parts = {"loss": loss_sum(logits, batch.labels) / num_step_tokens}
    parts.update(dict.fromkeys(AUXILIARY, torch.zeros((), dtype=torch.float64)))
    for predicted, ahead in zip(further, batch.ahead):
        parts["mtp_loss"] = parts["mtp_loss"] + settings["training.mtp_loss_weight"] / len(
            further) * loss_sum(predicted, ahead.labels) / num_step_tokens
    counts, num_main = [], len(of_layers) - len(further)
    for number, (router, chosen) in enumerate(of_layers):
        valid = (batch if number < num_main else batch.ahead[number - num_main]).valid
        sequence = batch.sequence
        p = router.sigmoid() if model.is_sigmoid else router.softmax(-1)
        p = p / p.sum(-1, keepdim=True)

        sets = [valid] if settings["moe.balance_over"] == "micro_batch" else [
            valid & (sequence == s) for s in sequence.unique()]
        balance = sum(balance_loss(router[s], p[s], model.top_k, num_step_tokens) for s in sets)
        z = router.logsumexp(-1)[valid].square().sum() / num_step_tokens
        for name, value in zip(AUXILIARY[:2], (balance, z)):
            parts[name] = parts[name] + settings[f"moe.{name}_weight"] * value
        counts.append(chosen[valid].sum(0))
    return parts, counts


# ---- the run


def learning_rates(settings):
    """Factors of the peak, of every step, by torch's schedulers."""
    steps, warmup = settings["training.steps"], settings["lr_scheduler.warmup_steps"]
    kind, floor = settings["lr_scheduler.kind"], settings["lr_scheduler.min_lr_factor"]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    decay = round(settings["lr_scheduler.decay_ratio"] * steps) if kind == "wsd" \
        else steps - warmup if kind != "constant" else 0
    after = {"cosine": lambda: lr_scheduler.CosineAnnealingLR(optimizer, decay, eta_min=floor),
             "constant": lambda: lr_scheduler.ConstantLR(optimizer, factor=1),
             **dict.fromkeys(("linear", "wsd"), lambda: lr_scheduler.LinearLR(
                 optimizer, 1.0, floor, decay))}[kind]
    parts = [(warmup, lambda: lr_scheduler.LinearLR(optimizer, 1 / warmup, 1.0, warmup - 1)),
             (steps - warmup - decay, lambda: lr_scheduler.ConstantLR(optimizer, factor=1)),
             (math.inf, after)]
    factors = []
    for length, make in parts:  # each from the peak
        optimizer.param_groups[0].update(lr=1.0, initial_lr=1.0)
        scheduler = make() if length > 1 or make is after else None
        for _ in range(min(length, steps - len(factors))):
            factors.append(scheduler.get_last_lr()[0] if scheduler else 1.0)
            if scheduler:
                optimizer.step()
                scheduler.step()
    return factors


def groups_of(settings):
    groups = []
    while f"optimizer.group.{len(groups)}.match" in settings:
        at = f"optimizer.group.{len(groups)}."
        groups.append({k: settings.get(at + k) for k in ("match", "lr_scale", "weight_decay")})
    return groups


class MuonAndAdamW:
    """torch.optim.Muon in float64 for every matrix, each expert's own too; AdamW for the rest."""

    def __init__(self, model, groups, settings):
        others, matrices, self.slices = [], [], []
        names = {p: name for name, p in model.named_parameters()}
        for group in groups:
            p = group["params"][0]
            name = names[p]
            is_table = re.search(r"embed_tokens|lm_head|\.(gate|router)\.weight$", name)
            if p.dim() < 2 or is_table:
                others.append(group)
                continue
            halves = 2 if "gate_up" in name else 1
            parts = [(lambda t: t)] if p.dim() == 2 else [
                (lambda t, e=e, halves=halves, half=half: t[e].chunk(halves)[half])
                for e in range(len(p)) for half in range(halves)]
            for part in parts:
                matrix = torch.nn.Parameter(part(p.data))  # the same memory
                self.slices.append((matrix, p, part))
                matrices.append({**group, "params": [matrix]})
        self.muon = torch.optim.Muon(
            matrices, momentum=settings["optimizer.muon_momentum"],
            nesterov=settings["optimizer.nesterov"], adjust_lr_fn="match_rms_adamw")
        self.adamw = torch.optim.AdamW(others, eps=settings["optimizer.eps"], betas=(
            settings["optimizer.beta1"], settings["optimizer.beta2"]))
        self.param_groups = self.muon.param_groups + self.adamw.param_groups
        self.params = [g["params"][0] for g in groups]

    def step(self):
        for matrix, p, part in self.slices:
            matrix.grad = part(p.grad)
        rounded, torch.Tensor.bfloat16 = torch.Tensor.bfloat16, lambda t: t.clone()
        try:
            self.muon.step()
        finally:
            torch.Tensor.bfloat16 = rounded
        self.adamw.step()

    def zero_grad(self):
        for p in self.params:
            p.grad = None


def make_optimizer(model, settings):
    """The first group whose pattern is in a name counts. Matrices decay, each expert's own too."""
    groups = []
    for name, p in model.named_parameters():
        found = next((g for g in groups_of(settings) if re.search(g["match"], name)), {})
        is_matrix = p.dim() - (".experts." in name) > 1
        decay = found.get("weight_decay")
        if decay is None:
            decay = settings["optimizer.weight_decay"] if is_matrix else 0
        scale = found.get("lr_scale")
        groups.append(dict(params=[p], scale=1 if scale is None else scale, weight_decay=decay))
    if settings["optimizer.name"] == "muon":
        return MuonAndAdamW(model, groups, settings)
    if settings["optimizer.name"] == "sgd":
        return torch.optim.SGD(groups, momentum=settings["optimizer.momentum"])
    return torch.optim.AdamW(groups, eps=settings["optimizer.eps"], betas=(
        settings["optimizer.beta1"], settings["optimizer.beta2"]))


def clip(params, max_norm):
    for p in params:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    norm = torch.nn.utils.get_total_norm([p.grad for p in params])
    if max_norm > 0:
        for p in params:
            p.grad *= (max_norm / norm).clamp(max=1)
    return norm.item()


@torch.no_grad()
def clip_logits(model, tau):
    """QK-clip, as Kimi K2's report has it for MLA; where heads share a key, queries take it all.
    Returns how many heads were clipped, and how many there are."""
    c = model.model.config
    num_clipped = num_heads = 0
    for i, layer in enumerate(model.model.model.layers):
        attention, largest = layer.self_attn, model.largest[i]
        gamma = torch.where(largest > tau, tau / largest, 1.0)
        num_clipped, num_heads = num_clipped + (gamma < 1).sum().item(), num_heads + len(gamma)
        scales = gamma.view(-1, 1, 1)
        if hasattr(attention, "kv_b_proj"):
            q = attention.q_b_proj if c.q_lora_rank else attention.q_proj
            q, kv = (w.weight.view(len(gamma), -1, w.in_features) for w in (q, attention.kv_b_proj))
            q[:, :c.qk_nope_head_dim] *= scales.sqrt()
            q[:, c.qk_nope_head_dim:] *= scales
            kv[:, :c.qk_nope_head_dim] *= scales.sqrt()
            continue
        is_shared = attention.num_key_value_groups > 1
        for linear, power in ((attention.q_proj, 1 if is_shared else 0.5),
                              (attention.k_proj, 0 if is_shared else 0.5)):
            for w in linear.parameters():
                w.view(-1, attention.head_dim, w[0].numel()).mul_(
                    scales ** power if power else 1)
    return num_clipped, num_heads


def move_bias(bias, counts, coeff):
    step = coeff * (counts.sum() - len(counts) * counts).sign().to(bias.dtype)
    bias += step - step.mean()


def micro_batches(get, settings, masks, first, depth):
    """Those of a step, of all data-parallel ranks together."""
    per_step, num = settings["training.global_batch_size"], settings["micro_batches"]
    size = per_step // num
    return [MicroBatch([get(first + m * size + i) for i in range(size)], masks, depth)
            for m in range(num)]


def given_experts(settings, step):
    """Of each micro-batch: [layers, tokens, k], or nothing."""
    if "moe.replay" not in settings:
        return [None] * settings["micro_batches"]
    experts = np.load(settings["moe.replay"] / f"step-{step + 1:08}.npy")
    return torch.tensor(experts.astype(np.int64)).chunk(settings["micro_batches"], dim=1)


def validate(model, sequences, settings, masks):
    """The mean over the first tokens of a file, in its order, which is read once: loss, and of each
    depth of multi-token prediction loss and acceptance, the share of tokens that the model itself
    predicts as well when it comes to them."""
    per_step = settings["training.global_batch_size"]
    sequences = sequences[:settings["validation.steps"] * per_step]
    depth = len(model.mtp)
    sums = torch.zeros(1 + depth, 3, dtype=torch.float64)  # loss, accepted, tokens
    with torch.no_grad():
        for s in sequences:
            batch = MicroBatch([s], masks, depth)
            logits, _ = model.forward(batch)
            words = [x.argmax(-1) for x in logits]
            for k, of_depth in enumerate([batch, *batch.ahead]):
                later = torch.cat([words[0][k:], words[0].new_full((k,), -1)])
                accepted = (words[k] == later) & of_depth.valid
                sums[k] += torch.stack([loss_sum(logits[k], of_depth.labels), accepted.sum(),
                                        of_depth.valid.sum()])
    means = (sums[:, :2] / sums[:, 2:]).tolist()
    return {"loss": means[0][0], **{f"mtp.{k}.{name}": value for k, both in enumerate(means[1:])
                                    for name, value in zip(("loss", "acceptance"), both)}}


def run(folder, files, settings):
    """The records of all steps, and the model after them."""
    model, factors = Model(folder), learning_rates(settings)
    params = list(model.model.parameters())
    optimizer = make_optimizer(model.model, settings)
    data = Data([f for f, _ in files["train"]], [w for _, w in files["train"]], settings)
    masks = {"true": True, "false": False}.get(
        settings["data.document_mask"],
        any(f.suffix in (".jsonl", ".bin") for f, _ in files["train"]))
    pack = best_fit if settings["data.packing"] == "best_fit" else cut
    held_out = {name: pack(documents_of(f), settings["data.sequence_length"])
                for name, f in files["validation"].items()}
    steps, records, clipped = settings["training.steps"], [], np.zeros(2, int)
    for step in range(steps):
        batches = micro_batches(data.__getitem__, settings, masks,
                                step * settings["training.global_batch_size"], len(model.mtp))
        num_tokens = sum(b.valid.sum().item() for b in batches)
        record = dict.fromkeys(("loss", *AUXILIARY), 0.0)
        counts = [0] * len(model.routers)
        for batch, model.given in zip(batches, given_experts(settings, step)):
            parts, chosen = losses_of(model, batch, settings, max(1, num_tokens))
            sum(parts.values()).backward()
            counts = [c + n for c, n in zip(counts, chosen)]
            for name, value in parts.items():
                record[name] += value.item()
        model.given = None
        record["total_loss"] = sum(record.values())
        record["grad_norm"] = clip(params, settings["training.max_norm"])
        record["lr"] = settings["optimizer.lr"] * factors[step]
        record["tokens"], record["skipped"] = num_tokens, num_tokens == 0
        if num_tokens > 0:
            for group in optimizer.param_groups:
                group["lr"] = record["lr"] * group["scale"]
            optimizer.step()
            if "optimizer.qk_clip" in settings:
                clipped += np.array(clip_logits(model, settings["optimizer.qk_clip"]))
            for bias, n in zip(model.bias, counts):
                move_bias(bias, n, settings["moe.load_balance_coeff"])
        optimizer.zero_grad()
        if "optimizer.qk_clip" in settings:
            record["max_logit"] = max(s.max().item() for s in model.largest.values())
        model.largest.clear()
        record["expert_counts"] = [n.tolist() for n in counts]
        record["expert_bias"] = [[b.min().item(), b.max().item()] for b in model.bias]
        if (step + 1) % settings["validation.interval"] == 0 or step + 1 == steps:
            record["validation"] = {name: validate(model, s, settings, masks)
                                    for name, s in held_out.items()}
        records.append(record)
    assert "optimizer.qk_clip" not in settings or 0 < clipped[0] < clipped[1], clipped
    return records, model.model
