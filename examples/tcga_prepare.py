"""One table of TCGA-BRCA for examples/tcga.yaml, from the files of FLamby's repository.

FLamby (Ogier du Terrail et al. 2022, 2210.04620) is at https://github.com/owkin/FLamby, whose folder
flamby/datasets/fed_tcga_brca has the 1,088 patients' 39 features, times and events, and the split by region and fold.
The data are The Cancer Genome Atlas's: read the terms that the folder's README.md names before you use them.

    git clone --depth 1 https://github.com/owkin/FLamby
    python examples/tcga_prepare.py FLamby/flamby/datasets/fed_tcga_brca data/tcga.csv
"""

import csv
import sys
from pathlib import Path

__all__ = ["main", "prepare"]

CENTRES = ("Northeast", "South", "West", "Midwest", "Europe", "Canada")


def prepare(folder: Path, output: Path) -> int:
    """Join features and split into one table, and tell how many patients it has.

    Args:
        folder: FLamby's, with ``brca.csv`` and ``dataset_creation_scripts/train_test_split.csv``.
        output: the table: the features as they are, ``time``, ``event``, ``centre``, and ``split``, train or test.

    Raises:
        OSError: if a file is missing.
    """
    with (folder / "dataset_creation_scripts" / "train_test_split.csv").open(newline="") as file:
        split = {row["pid"]: (row["fold2"].rpartition("_")[2], row["fold"]) for row in csv.DictReader(file)}
    with (folder / "brca.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    features = header[1:-2]  # between the patient's number and E, T
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*features, "time", "event", "centre", "split"])
        for patient, *values, event, time in rows:
            if patient in split:  # FLamby leaves out the others, whose region is unknown
                centre, fold = split[patient]
                writer.writerow([*values, time, int(float(event)), CENTRES[int(centre)], fold])
    return sum(patient in split for patient, *_ in rows)


def main() -> int:
    """Prepare the table of the folder and the file that the command names."""
    if len(sys.argv) != 3:
        print("usage: python examples/tcga_prepare.py FLamby/flamby/datasets/fed_tcga_brca data/tcga.csv")
        return 2
    folder, output = map(Path, sys.argv[1:])
    try:
        patients = prepare(folder, output)
    except OSError as error:
        print(f"{error.filename} must be FLamby's, got {error.strerror}: clone https://github.com/owkin/FLamby")
        return 1
    print(f"{patients} patients in {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
