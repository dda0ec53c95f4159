"""Who a process is, from its environment alone."""

from functools import partial
from itertools import combinations

import pytest

from ptdbench.launch.world import LAUNCHERS, Place, World, discover, local_environments, tasks_per_node
from tests.refusals import Abridged, refusal_of

TORCHRUN = {"TORCHELASTIC_RUN_ID": "a1", "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}

OPEN_MPI = {
    f"OMPI_COMM_WORLD_{name}": value
    for name, value in {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}.items()
}

MPICH = {"PMI_RANK": "3", "PMI_SIZE": "6", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "3"}

#: The last task of ``srun -N4 --ntasks=7`` as Slurm 22.05 shows it.
SRUN = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "6", "SLURM_STEP_NUM_TASKS": "7", "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "3", "SLURM_STEP_NUM_NODES": "4",
}  # fmt: skip

#: What ``srun --pty bash`` gives a shell, and the steps that are started in it inherit.
PTY = {"SLURM_PTY_PORT": "40001", "SLURM_PTY_WIN_COL": "80", "SLURM_PTY_WIN_ROW": "24"}
ONE_TASK = {
    "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_NODES": "1",
}  # fmt: skip

#: What a batch script itself has: no step, and yet a task's number.
BATCH = {
    "SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}  # fmt: skip

BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}

#: The same variables as torchrun's, with ``cluster=env``.
ENV = {"PTDBENCH_ENV": "1", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}

#: In the order in which they win.
ALL = {
    "torchrun": (TORCHRUN, World(5, 8, 1, 4, "torchrun", nodes=2)),
    "env": (ENV, World(3, 4, 1, 2, "env", nodes=2)),
    "openmpi": (OPEN_MPI, World(3, 4, 1, 2, "openmpi", nodes=2)),
    "mpich": (MPICH, World(3, 6, 0, 3, "mpich", nodes=2)),
    "srun": (SRUN, World(6, 7, 0, 1, "srun", nodes=4)),
}


refused = partial(refusal_of, discover)


def of_task(rank: int, node: int, local_rank: int) -> dict[str, str]:
    return SRUN | {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(node), "SLURM_LOCALID": str(local_rank)}


@pytest.mark.parametrize(("environ", "world"), [
    *ALL.values(),
    # Of two launchers the first of the table wins, and beside any stale variables do not matter.
    *((ALL[second][0] | ALL[first][0], ALL[first][1]) for first, second in combinations(ALL, 2)),
    *((BY_HAND | environ, world) for environ, world in ALL.values()),
    (
        TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        World(0, 1, 0, 1, "torchrun", nodes=1),
    ),
    # torchrun knows better than a division; of openmpi's ranks 2 are here, and 1 or 3 elsewhere.
    (TORCHRUN | {"GROUP_WORLD_SIZE": "3"}, World(5, 8, 1, 4, "torchrun", nodes=3)),
    (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "5"}, World(3, 5, 1, 2, "openmpi", nodes=None)),
    # Nodes of srun may have different numbers of tasks.
    (of_task(0, 0, 0), World(0, 7, 0, 2, "srun", nodes=4)),
    (of_task(3, 1, 1), World(3, 7, 1, 2, "srun", nodes=4)),
    # mpirun in an allocation: each rank has the step variables of its node's helper.
    (
        SRUN | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"} | OPEN_MPI,
        ALL["openmpi"][1],
    ),
    # Steps with PMI are no MPICH's, and those started in a terminal of srun are ranks.
    (SRUN | {"PMI_RANK": "6", "PMI_SIZE": "7"}, ALL["srun"][1]),
    (SRUN | PTY, ALL["srun"][1]),
    (SRUN | ONE_TASK | PTY | OPEN_MPI, ALL["openmpi"][1]),
])  # fmt: skip
def test_world_is_what_the_launcher_describes(environ, world):
    assert discover(environ) == world


@pytest.mark.parametrize("environ", [
    {"PATH": "/bin", "HOME": "/home/ada"},
    # Left over in a shell, or set for something else: no launcher's mark.
    {name: value for name, value in TORCHRUN.items() if name != "TORCHELASTIC_RUN_ID"},
    *({name: value for name, value in BY_HAND.items() if name != missing} for missing in BY_HAND),
    BY_HAND | {"RANK": "0", "WORLD_SIZE": "1"},
    {"JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "1"},  # it starts ranks of its own
    # A shell under salloc or srun --pty is an allocation, and a batch script no step.
    {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"},
    BATCH,
    SRUN | ONE_TASK | PTY,
    SRUN | ONE_TASK | {"SLURM_STEP_ID": "4294967290"},
])  # fmt: skip
def test_process_without_launcher_is_no_rank(environ):
    assert discover(environ) is None


@pytest.mark.parametrize(("launcher", "missing"), [
    (name, variable)
    for name, row in LAUNCHERS.items()
    for variable in row.variables
    if variable not in (*row.proof, row.nodes, row.local_size if row.node else "")
])  # fmt: skip
def test_missing_variable_is_named(launcher, missing):
    environ = {name: value for name, value in ALL[launcher][0].items() if name != missing}
    refusal = f"{missing}=(not set): {launcher} must have set it to a whole number; …environment says\n  {launcher}: …"
    if launcher == "env":
        refusal = f"{missing}=(not set): the launcher must have set it …; set it for every rank …, or omit cluster=env"
    assert refused(environ) == Abridged(refusal)


@pytest.mark.parametrize("listed", ["", "x3", "2(x3", "2(3)", "2,,1", "-1", "2 (x3)", "2(x3)"])
def test_malformed_tasks_per_node_are_refused(listed):
    """The last one is of three nodes, and this is the fourth."""
    refusal = f"SLURM_STEP_TASKS_PER_NODE={listed or '(not set)'}: srun must have set it …; this is node 3; …"
    assert refused(SRUN | {"SLURM_STEP_TASKS_PER_NODE": listed}) == Abridged(refusal)


@pytest.mark.parametrize("value", ["", "one", "-1", "1.5", "2(x3)", "²"])
def test_malformed_rank_is_refused(value):
    assert refused(TORCHRUN | {"RANK": value}).startswith(f"RANK={value or '(not set)'}: torchrun must have set it")


@pytest.mark.parametrize("contradiction", [
    {"RANK": "8"}, {"LOCAL_RANK": "4"}, {"WORLD_SIZE": "0"}, {"LOCAL_WORLD_SIZE": "0"},
    {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"},  # fewer in all than on this node
])  # fmt: skip
def test_contradictory_variables_are_quoted(contradiction):
    message = refused(TORCHRUN | contradiction)
    assert all(f"{name}={value}" in message for name, value in (TORCHRUN | contradiction).items())


def test_refusals_name_variables_of_launchers_and_ranks_set_by_hand():
    assert list(ALL) == list(LAUNCHERS)  # each has an example
    lines = refused(OPEN_MPI | SRUN | {"OMPI_COMM_WORLD_SIZE": "2"}).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["openmpi:", "srun:"]
    assert "OMPI_COMM_WORLD_SIZE=2" in lines[1]
    assert "SLURM_STEP_TASKS_PER_NODE=2(x3),1" in lines[2]
    names = "RANK WORLD_SIZE MASTER_ADDR MASTER_PORT"
    refusal = f"RANK=1: with WORLD_SIZE=2 MASTER_ADDR=n1 MASTER_PORT=29500 …; add cluster=env if …, or unset {names}"
    assert refused(BY_HAND) == Abridged(refusal)


@pytest.mark.parametrize(("environ", "size"), [
    ({"PALS_RANKID": "1", "PALS_LOCAL_RANKID": "1", "PMI_RANK": "1", "PMI_SIZE": "4"}, "PMI_SIZE"),
    ({"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "4", "JSM_NAMESPACE_LOCAL_RANK": "1"}, "JSM_NAMESPACE_SIZE"),
    ({"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "4", "FLUX_TASK_LOCAL_ID": "1"}, "FLUX_JOB_SIZE"),
    ({"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "4"}, "MV2_COMM_WORLD_SIZE"),
], ids=["Cray PALS", "jsrun", "flux run", "mpirun_rsh"])  # fmt: skip
def test_rank_of_an_unknown_launcher_is_refused(environ, size):
    refusal = f"{size}=4: …, and their launcher is not recognized; start them with torchrun, …; if stale, unset {size}"
    assert refused(environ) == Abridged(refusal)
    assert all(discover(environ | variables) == world for variables, world in ALL.values())


def test_local_environment_is_that_of_torchrun():
    first, second = local_environments(2, "127.0.0.1", 1234)
    assert discover(first) == World(0, 2, 0, 2, "torchrun", nodes=1)
    assert discover(second) == World(1, 2, 1, 2, "torchrun", nodes=1)
    assert first["TORCHELASTIC_RUN_ID"] == second["TORCHELASTIC_RUN_ID"]
    assert (second["MASTER_ADDR"], second["MASTER_PORT"], second["ROLE_RANK"]) == ("127.0.0.1", "1234", "1")


def test_pretended_nodes_and_absent_ranks_are_in_the_environment():
    where = Place(nodes=32, present=[5, 131, 255], environ={"LD_PRELOAD": "a.so", "OTHER": "1"})
    places = list(local_environments(256, "127.0.0.1", 1234, where))
    worlds = [discover(place) for place in places]
    assert worlds == [
        World(rank, 256, rank % 8, 8, "torchrun", nodes=32, present=(5, 131, 255)) for rank in (5, 131, 255)
    ]
    assert [world.is_first for world in worlds] == [True, False, False]
    assert [place["GROUP_RANK"] for place in places] == ["0", "16", "31"]
    assert [place["OTHER"] for place in places] == ["1"] * 3
    assert where.loading == {"LD_PRELOAD": "a.so"}


@pytest.mark.parametrize(
    ("text", "counts"), [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("16(x1)", [16]), ("1(x2),1,3(x2)", [1, 1, 1, 3, 3])]
)
def test_tasks_per_node(text, counts):
    assert tasks_per_node(text) == counts
