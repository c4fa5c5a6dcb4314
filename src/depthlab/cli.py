"""The command line. Each command imports its part when it is called, so that `depthlab --help` is quick.

Exit codes: 0 well, 1 a check says no, 2 an error (one sentence on stderr; DEPTHLAB_DEBUG=1 shows the traceback),
130 interrupted.
"""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (sys.argv unless given) and return its exit code."""
    parser = _parser()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["runs"] and len(arguments) > 1 and not re.fullmatch("make|show|-.*", arguments[1]):
        arguments.insert(1, "show")
    chosen = parser.parse_args(arguments)
    if "run" not in chosen:
        parser.print_help()
        return 2
    try:
        code = chosen.run(chosen)
        if sys.stdout is not None:  # closed by the caller
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `depthlab claims | head`: nobody reads on, so say nothing more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if os.environ.get("DEPTHLAB_DEBUG") == "1":
            raise
        print(f"depthlab: {_sentence(error)}", file=sys.stderr)
        return 2


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, ImportError):
        return f"{text}; run `depthlab doctor` to see what is missing and how to get it."
    if isinstance(error, ValueError | TypeError | RuntimeError | ArithmeticError | OSError) and text:
        return text
    return f"unexpected {type(error).__name__} ({text}); run again with DEPTHLAB_DEBUG=1 and report the traceback."


def _parser() -> argparse.ArgumentParser:
    from depthlab import __version__

    parser = argparse.ArgumentParser(prog="depthlab", description="What happens to a signal on its way through depth.")
    parser.add_argument("--version", action="version", version=f"depthlab {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    claims = commands.add_parser("claims", help="every claim of the papers with its computed verdict")
    either = claims.add_mutually_exclusive_group()
    either.add_argument(
        "--check", action="store_true", help="fail if the README's tables are not what the records give"
    )
    either.add_argument("--write", metavar="README", help="generate the tables in this file")
    claims.add_argument("ids", nargs="*", metavar="ID", help="show these, with what each rule saw (GC-1 MGR-3 ...)")
    claims.set_defaults(run=_claims)

    _add_language_models(commands)

    runs = commands.add_parser("runs", help="list the records, make one again, or compare training runs (runs DIR...)")
    runs.set_defaults(run=_list_runs)
    runs_of = runs.add_subparsers(metavar="make|show")
    show = runs_of.add_parser("show", help="one table of the training runs in these folders; `runs DIR...` for short")
    show.add_argument("folders", nargs="+", metavar="DIR", help="folders that `depthlab train --out` made")
    show.set_defaults(run=_show_runs)
    make = runs_of.add_parser("make", help="run an experiment and write its record")
    make.add_argument("id", help="a record that `depthlab runs` lists")
    make.add_argument("--processes", type=int, default=1, help="worker processes, one thread each (default 1)")
    make.add_argument("--work-dir", help="where finished cells are kept (default build/runs)")
    make.add_argument("--out-dir", help="where the record goes (default data/results)")
    make.set_defaults(run=_make_run)

    notebooks = commands.add_parser("notebooks", help="execute and check the notebooks").add_subparsers(
        metavar="run|check|table|links", required=True
    )
    run = notebooks.add_parser("run", help="execute in fresh kernels")
    run.add_argument("paths", nargs="*", metavar="NOTEBOOK", help="default: all numbered notebooks")
    run.add_argument("--in-place", action="store_true", help="write the outputs into the notebooks themselves")
    run.add_argument("--out-dir", default="build/notebooks", help="where executed copies go (default build/notebooks)")
    run.set_defaults(run=_run_notebooks)
    check = notebooks.add_parser("check", help="policy, then a new run compared with the committed outputs")
    check.add_argument("paths", nargs="*", metavar="NOTEBOOK", help="default: all numbered notebooks")
    check.set_defaults(run=_check_notebooks)
    table = notebooks.add_parser("table", help="write the README's table of notebooks")
    table.add_argument("--check", action="store_true", help="write nothing; fail if it is not up to date")
    table.add_argument("--readme", default="README.md", help="the file with the markers (default README.md)")
    table.set_defaults(run=_notebook_table)
    links = notebooks.add_parser("links", help="make the Colab links follow pyproject's repository address")
    links.set_defaults(run=_notebook_links)

    exercises = commands.add_parser("exercises", help="generate the students' copies")
    exercises.add_argument("--check", action="store_true", help="write nothing; fail if they are not up to date")
    exercises.set_defaults(run=_exercises)

    data = commands.add_parser("data", help="look after the data").add_subparsers(metavar="prepare", required=True)
    prepare = data.add_parser("prepare", help="verify the bundled data")
    prepare.add_argument("--full", action="store_true", help="also download the complete MNIST into the cache")
    prepare.set_defaults(run=_prepare_data)

    bench = commands.add_parser("bench", help="measure the kernels on a GPU").add_subparsers(
        metavar="mgr", required=True
    )
    bench_mgr = bench.add_parser("mgr", help="mixing and pooling: correctness first, then time, memory and bytes")
    bench_mgr.add_argument("--parts", help="which records (all: tests,bench,inverting,profile; a trial: bench)")
    bench_mgr.add_argument(
        "--quick", action="store_true", help="three shapes once, for tuning: no record of the ledger"
    )
    bench_mgr.add_argument(
        "--only", default="", metavar="TEXT", help="rows whose name holds this; as --quick otherwise"
    )
    bench_mgr.add_argument("--work-dir", help="where finished cells are kept (default build/runs)")
    bench_mgr.add_argument("--out", help="where the records go (default data/results)")
    bench_mgr.set_defaults(run=_bench_mgr)

    doctor = commands.add_parser("doctor", help="what is installed, what works, what is missing and how to get it")
    doctor.set_defaults(run=_doctor)
    return parser


def _add_language_models(commands: argparse._SubParsersAction) -> None:
    train = commands.add_parser(
        "train", help="train a language model over any residual scheme", argument_default=argparse.SUPPRESS
    )
    train.add_argument("--out", required=True, metavar="DIR", help="where log and checkpoints go")
    train.add_argument("--resume", action="store_true", help="go on with the run in DIR, with its own settings")
    train.add_argument("--device", help="auto (default), cpu, cuda")
    for title, options in _TRAIN_OPTIONS.items():
        group = train.add_argument_group(title)
        for flag, (name, kind, text) in options.items():
            how = {"action": "store_true"} if kind is bool else {"type": kind, "metavar": kind.__name__.upper()}
            group.add_argument(flag, dest=name, help=text, **how)
    train.set_defaults(run=_train)

    generate = commands.add_parser("generate", help="let a trained model continue a prompt")
    generate.add_argument("folder", metavar="DIR", help="a run, or one of its checkpoints")
    generate.add_argument("--prompt", default="\n", help="text to go on from (default: a new line)")
    generate.add_argument("--tokens", type=int, default=200, help="how many (default 200)")
    generate.add_argument("--seed", type=int, default=0, help="of the draws (default 0)")
    generate.add_argument("--temperature", type=float, default=1.0, help="0 takes the likeliest token (default 1)")
    generate.add_argument("--top-k", type=int, help="draw among the k likeliest only")
    generate.add_argument("--device", default="auto", help="auto (default), cpu, cuda")
    generate.set_defaults(run=_generate)

    evaluate = commands.add_parser("eval", help="loss, perplexity and bits per byte of a trained model")
    evaluate.add_argument("folder", metavar="DIR", help="a run, or one of its checkpoints")
    evaluate.add_argument("--data", help="as for train (default: what the run was trained on)")
    evaluate.add_argument("--split", default="validation", help="train, validation (default) or test")
    evaluate.add_argument("--tokens", type=int, help="only the first so many (default all)")
    evaluate.add_argument("--device", default="auto", help="auto (default), cpu, cuda")
    evaluate.set_defaults(run=_evaluate)


# flag -> (option of depthlab.lm.commands, type, help); what is not given is the preset's, or a resumed run's own
_TRAIN_OPTIONS: dict[str, dict[str, tuple[str, type, str]]] = {
    "model": {
        "--model": ("model", str, "gpt (default), llama or looped"),
        "--preset": ("preset", str, "toy (default), S, M, L of gpt; toy, 34M of llama; toy, small of looped"),
        "--residual": ("residual", str, "prenorm, hc, mhc-lite, attnres, attnres-block, mgr-independent, .."),
        "--streams": ("n_streams", int, "n of hc, mhc-lite and mgr"),
        "--variant": ("variant", str, "of looped: lt, lt-input, lt-attn, flt-res or flt (default)"),
        "--loops": ("n_loops", int, "K of looped, how often its blocks are applied"),
        "--objective": ("objective", str, "of looped: the loss of the last loop (END, default), of all (STEP), FEW"),
        "--backprop-loops": ("backprop_loops", int, "of looped: differentiate only the last so many"),
        "--layers": ("n_layers", int, "blocks of one attention and one MLP"),
        "--heads": ("n_heads", int, "attention heads"),
        "--width": ("d_model", int, "C"),
        "--seq-len": ("seq_len", int, "tokens that the model reads"),
        "--vocab-size": ("vocab_size", int, "default: the tokenizer's"),
        "--dropout": ("dropout", float, "of embedding, attention weights and sublayer outputs"),
        "--backend": ("backend", str, "of the residual's kernels: auto (default), torch or triton"),
        "--recompute": ("recompute", str, "of gpt with mgr: auto rebuilds streams in the backward pass; off (default)"),
    },
    "data": {
        "--data": ("data", str, "sotu (default), a .txt or .tokens file, or owner/name@commit on the hub"),
        "--tokenizer": ("tokenizer", str, "bytes (default), or bpe-SIZE, trained on the training text"),
        "--batch-size": ("batch_size", int, "sequences a batch"),
        "--from": ("start", str, "a checkpoint or run whose weights to begin with"),
        "--seed": ("seed", int, "of start values, data order and dropout (default 0)"),
    },
    "training": {
        "--steps": ("steps", int, "updates in all (default 200)"),
        "--optimizer": ("optimizer", str, "adamw (default), muon, or flt (the published loop setting)"),
        "--lr": ("lr", float, "peak learning rate"),
        "--schedule": ("schedule", str, "cosine (default), trapezoid or constant"),
        "--warmup": ("warmup_steps", int, "steps of linear warm-up (default a tenth of all, at most 100)"),
        "--weight-decay": ("weight_decay", float, "of weight matrices"),
        "--clip": ("clip", float, "largest gradient norm (default 1)"),
        "--accumulate": ("accumulate", int, "batches a step (default 1)"),
        "--precision": ("precision", str, "float32 (default) or bfloat16 by autocast"),
        "--compile": ("compile", bool, "use torch.compile"),
        "--log-every": ("log_every", int, "steps between lines of the log (default 10)"),
        "--evaluate-every": ("evaluate_every", int, "steps between validations; 0: only at the end"),
        "--evaluate-tokens": ("evaluate_tokens", int, "validate on the first so many; 0: all"),
        "--checkpoint-every": (
            "checkpoint_every",
            int,
            "steps between checkpoints (default 500, toy 50); 0: only at the end",
        ),
        "--keep": ("keep", int, "newest checkpoints to keep; 0 (default): all"),
    },
}


def _models() -> dict[str, tuple]:
    from depthlab.lm.commands import MODELS
    from depthlab.looped import LoopedConfig, LoopedTransformer

    return {**MODELS, LoopedConfig.kind: (LoopedConfig, LoopedTransformer)}


def _train(chosen: argparse.Namespace) -> int:
    from depthlab.lm import commands

    given = {name: value for name, value in vars(chosen).items() if name not in ("run", "out", "resume", "device")}
    options = vars(chosen)
    result = commands.train_run(chosen.out, given, "resume" in options, options.get("device", "auto"), _models())
    validated = f", validation loss {result.val_loss:.4f}" if result.val_loss == result.val_loss else ""
    print(f"{chosen.out}: step {result.step}, loss {result.loss:.4f}{validated}; {result.checkpoint}")
    return 0


def _generate(chosen: argparse.Namespace) -> int:
    from depthlab.lm import commands

    how = (chosen.tokens, chosen.seed, chosen.temperature, chosen.top_k, chosen.device, _models())
    print(commands.generate_text(chosen.folder, chosen.prompt, *how))
    return 0


def _evaluate(chosen: argparse.Namespace) -> int:
    from depthlab.lm import commands

    found = commands.evaluate_run(chosen.folder, chosen.data, chosen.split, chosen.tokens, chosen.device, _models())
    bits = "" if found.bits_per_byte is None else f", {found.bits_per_byte:.4f} bits per byte"
    print(
        f"{chosen.folder}: loss {found.loss_nats:.4f} nats a token, perplexity {found.perplexity:.3f}{bits} "
        f"({chosen.split}, {found.n_tokens:,} tokens)"
    )
    return 0


def _show_runs(chosen: argparse.Namespace) -> int:
    from depthlab.lm import commands

    print(commands.runs_table(chosen.folders))
    return 0


def _claims(chosen: argparse.Namespace) -> int:
    from depthlab import claims

    verdicts = claims.verdicts()
    if chosen.write:
        print(f"{chosen.write}: {'tables written' if claims.write_readme(chosen.write) else 'already up to date'}.")
        return 0
    if chosen.check:
        readme = _root() / "README.md"
        if claims.readme_text(readme) != readme.read_text(encoding="utf-8"):
            print("README.md is not what the records give; run `depthlab claims --write README.md`.", file=sys.stderr)
            return 1
        print(f"{claims.summary()} README.md agrees.")
        return 0
    if chosen.ids:
        print(claims.report(*chosen.ids))
        return 0
    for row in claims.rows():
        print(f"{row.id:<7} {verdicts[row.id].counted:<26}{row.statement}")
    print(claims.summary())
    return 0


def _list_runs(chosen: argparse.Namespace) -> int:
    from depthlab import claims
    from depthlab.ledger import read_ledger
    from depthlab.runs.record import load, record_ids

    book, bad = read_ledger(), 0
    for record_id in sorted(set(book.records) | set(record_ids())):
        try:
            claims.current_record(record_id, book)
            state = "current"
        except claims.LedgerError as error:
            state, bad = str(error), bad + 1
        cost = f", costs {book.records[record_id].cost}" if record_id in book.records else ""
        print(f"{record_id}: {state}{cost}")
        if state == "current":
            record = load(record_id)
            code = record.commit[:10] + ("" if record.clean else " with local changes")
            print(f"  {len(record.seeds)} seeds; {', '.join(record.claims)}; {record.date}, {code}")
    return 1 if bad else 0


def _make_run(chosen: argparse.Namespace) -> int:
    from depthlab import claims, runs

    work = Path(chosen.work_dir) if chosen.work_dir else _root() / "build" / "runs"
    out = Path(chosen.out_dir) if chosen.out_dir else _root() / "data" / "results"
    record = runs.make(claims.experiment(chosen.id), work, out, chosen.processes)
    print(f"{record.id}: {len(record.seeds)} seeds, {record.wall_time_s:.0f} s of computing, in {out / record.id}.json")
    return 0


def _run_notebooks(chosen: argparse.Namespace) -> int:
    from depthlab import nbtools

    return nbtools.run(chosen.paths or None, in_place=chosen.in_place, out_dir=chosen.out_dir)


def _check_notebooks(chosen: argparse.Namespace) -> int:
    from depthlab import nbtools

    return nbtools.check(chosen.paths or None)


def _notebook_table(chosen: argparse.Namespace) -> int:
    from depthlab import nbtools

    current = nbtools.write_readme_table(chosen.readme, check=chosen.check)
    if chosen.check and not current:
        print(f"{chosen.readme} is not up to date; run `depthlab notebooks table`.", file=sys.stderr)
        return 1
    print(f"{chosen.readme}: {'already up to date' if current else 'table written'}.")
    return 0


def _notebook_links(chosen: argparse.Namespace) -> int:
    from depthlab import nbtools

    nbtools.sync_colab()
    return 0


def _exercises(chosen: argparse.Namespace) -> int:
    from depthlab import nbtools

    return nbtools.write_exercises(check=chosen.check)


def _prepare_data(chosen: argparse.Namespace) -> int:
    from depthlab import data

    print("\n".join(data.prepare(full=chosen.full)))
    return 0


def _bench_mgr(chosen: argparse.Namespace) -> int:
    from depthlab.kernels.bench import command

    work = Path(chosen.work_dir) if chosen.work_dir else _root() / "build" / "runs"
    out = Path(chosen.out) if chosen.out else _root() / "data" / "results"
    trial = chosen.quick or chosen.only
    parts = chosen.parts or ("bench" if trial else ",".join(command.PARTS))
    return command.run(parts, chosen.quick, chosen.only, work, out)


def _doctor(chosen: argparse.Namespace) -> int:
    from depthlab.doctor import examine

    healthy, lines = examine()
    print("\n".join(lines))
    return 0 if healthy else 1


def _root() -> Path:
    """The checkout this package runs from, so that commands work in any folder; else the current folder."""
    checkout = Path(str(files("depthlab.bundles"))).parent
    return checkout if (checkout / "pyproject.toml").is_file() else Path.cwd()
