"""Published architectures, and beside each the smallest network of ours that errs no more.

    make figures    # results.csv and literature.csv → equal_error.csv, equal_error.md

or, by itself, python experiments/published/compare.py RESULTS.csv OUT.csv (or OUT.md). Parameters and FLOPs of both come from the widths by one formula: weights and biases of dense layers; two FLOPs a multiplication.
"""

import argparse
import itertools
from pathlib import Path

import pandas as pd

from tnvp import results

HERE = Path(__file__).parent
CLASSES, PIXELS = 10, 28 * 28
COMPARED = {"lenet_500_300": "lenet_300_100"}  # network of the literature → the one of ours it is compared with


def dense(sizes: list[int]) -> tuple[int, int]:
    """Parameters and FLOPs of Linear layers of these sizes, from the inputs that are read to the last outputs."""
    pairs = list(itertools.pairwise(sizes))
    return sum((before + 1) * after for before, after in pairs), sum(2 * before * after for before, after in pairs)


def mlp(widths: list[int]) -> tuple[int, int]:
    """Of inputs-hidden-hidden; two widths are read as hidden layers that see all pixels."""
    return dense([*([PIXELS] if len(widths) == 2 else []), *widths, CLASSES])


def lenet_5(widths: list[int]) -> tuple[int, int]:
    """Of conv1-conv2-inputs of fc1-fc1; three widths have all 16 inputs a channel. Positions: 24·24 and 8·8."""
    one, two, *hidden = widths
    features, last = hidden if len(hidden) == 2 else (16 * two, *hidden)
    parameters, flops = dense([features, last, CLASSES])
    parameters += 26 * one + (25 * one + 1) * two
    return parameters, flops + 2 * 25 * (one * 24**2 + one * two * 8**2)


COSTS = {"lenet_300_100": mlp, "lenet_500_300": mlp, "lenet_5": lenet_5}


def ours(table: pd.DataFrame) -> pd.DataFrame:
    """A row a network, criterion, scope and sparsity: mean error with its interval, mean costs, the widths of all seeds."""
    keys = ["config.model.name", "criterion", "config.pruning.scope", "config.pruning.sparsity"]
    rows = []
    for key, runs in table.assign(error=100 - table["test_accuracy"]).groupby(keys):
        error, widths = results.interval(runs, "error"), list(dict.fromkeys(runs.sort_values("seed")["widths"]))
        costs = runs["widths"].map(lambda text, name=key[0]: COSTS[name]([int(width) for width in text.split("-")]))
        costs = pd.DataFrame(costs.tolist()).mean()
        rows.append([*key, " ".join(widths), *costs, *error])
    columns = ["network", "criterion", "scope", "sparsity", "widths", "parameters", "flops", "n", "error", "half"]
    return pd.DataFrame(rows, columns=columns)


def compare(literature: pd.DataFrame, networks: pd.DataFrame) -> pd.DataFrame:
    """The literature, with columns ours_…: NaN where none of ours errs as little."""
    rows = []
    for row in literature.to_dict("records"):
        parameters, flops = COSTS[row["network"]]([int(width) for width in row["architecture"].split("-")])
        known = networks[networks["network"] == COMPARED.get(row["network"], row["network"])]
        known = known[known["n"] == known["n"].max()]  # a mean over fewer seeds is none to choose by
        good = known[known["error"] <= row["error_percent"]].sort_values("parameters")
        found = good.iloc[0] if len(good) else pd.Series(index=known.columns, dtype=object)
        mine = {f"ours_{name}": found[name] for name in known.columns if name != "network"}
        least = {"least_error": known["error"].min()}
        rows.append({**row, "parameters": parameters, "flops": flops, **mine, **least})
    return pd.DataFrame(rows)


def markdown(rows: pd.DataFrame) -> str:
    """What a reader wants to see; thousands of parameters and FLOPs, * for numbers that weren't checked."""
    names = ["network", "method", "architecture", "error", "parameters", "FLOPs"]
    names += ["ours", "widths", "error, n", "parameters", "FLOPs"]
    lines = ["| " + " | ".join(names) + " |", "| --- " * len(names) + "|"]
    for row in rows.to_dict("records"):
        unchecked = "*" if row["note"].startswith("from memory") else ""
        cells = [row["network"], row["method"] + unchecked, row["architecture"], f"{row['error_percent']:g}"]
        cells += [thousands(row["parameters"]), thousands(row["flops"])]
        if pd.isna(row["ours_error"]):
            none = "not run" if pd.isna(row["least_error"]) else f"none: {row['least_error']:.2f} is our least error"
            cells += [none, "", "", "", ""]
        else:
            cells += [f"{row['ours_criterion']}, {row['ours_scope']}, {row['ours_sparsity']:.0%}", row["ours_widths"]]
            cells += [f"{row['ours_error']:.2f} ± {row['ours_half']:.2f}, {row['ours_n']:.0f}"]
            cells += [thousands(row["ours_parameters"]), thousands(row["ours_flops"])]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def thousands(count: float) -> str:
    return f"{count / 1000:.1f}k"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", metavar="RESULTS.csv", type=Path, help="a published table of this study")
    parser.add_argument("out", metavar="OUT", type=Path, help="file to write, whose suffix says what: .csv, or .md to read")
    options = parser.parse_args(arguments)
    rows = compare(pd.read_csv(HERE / "literature.csv"), ours(results.published(options.results)))
    table = markdown(rows) + "\n" if options.out.suffix == ".md" else rows.to_csv(index=False, float_format="%.6g")
    options.out.write_text(table, encoding="utf-8")


if __name__ == "__main__":
    main()
