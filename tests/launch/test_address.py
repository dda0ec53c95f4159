"""Where ranks meet, from their environment alone."""

import socket
from dataclasses import replace
from functools import partial

import pytest

from ptdbench.launch import address
from ptdbench.launch.world import World
from tests.refusals import Abridged, refusal_of

#: Rank 2 of four, two on each of two nodes, under every launcher.
FAR = {name: World(2, 4, 0, 2, name, nodes=2) for name in ("torchrun", "openmpi", "mpich", "srun")}
MPI = ("openmpi", "mpich")

SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_JOB_NODELIST": "gpu[07-09]", "SLURM_STEP_NODELIST": "gpu[08-09]",
}  # fmt: skip


@pytest.fixture(autouse=True)
def ephemeral(tmp_path, monkeypatch):
    """The kernel's range of ports, for a test to change; what Linux has unless told otherwise."""
    file = tmp_path / "ip_local_port_range"
    file.write_text("32768\t60999\n")
    monkeypatch.setattr(address, "_EPHEMERAL", file)
    return file


def host(world: World, environ: dict[str, str]) -> str:
    return address.meeting_point(world, environ)[0]


def port(world: World, environ: dict[str, str]) -> int:
    return address.meeting_point(world, {"MASTER_ADDR": "n1"} | environ)[1]


refused = partial(refusal_of, address.meeting_point)


@pytest.mark.parametrize("launcher", FAR)
def test_master_addr_wins_and_ranks_of_one_node_meet_on_localhost(launcher):
    assert address.meeting_point(FAR[launcher], SLURM | {"MASTER_ADDR": "n1", "MASTER_PORT": "1234"}) == ("n1", 1234)
    near = replace(FAR[launcher], local_size=4, nodes=1)
    assert host(near, {}) == host(near, SLURM) == "localhost"


def test_host_is_the_first_node_of_the_step_or_job_and_a_malformed_list_refused():
    assert host(FAR["srun"], SLURM) == "gpu08"
    helper = {"SLURM_STEP_NODELIST": "gpu09"}  # what the ranks of other nodes inherit
    assert [host(FAR[launcher], SLURM | helper) for launcher in MPI] == ["gpu07"] * 2
    assert refused(FAR["srun"], SLURM | {"SLURM_STEP_NODELIST": "gpu[9-"}) == (
        "SLURM_STEP_NODELIST=gpu[9-: 'gpu[9-' is not a list of hosts such as gpu[01-03,7],login; "
        "set MASTER_ADDR to the host of rank 0 for all ranks"
    )


@pytest.mark.parametrize("environ", [{}, {"MASTER_ADDR": ""}, {"SLURM_JOB_NODELIST": ""}])
def test_unknown_host_is_refused_with_what_to_set(environ):
    refusal = "MASTER_ADDR=(not set): openmpi does not tell …; set it to …, for example mpirun -x MASTER_ADDR=host"
    assert refused(FAR["openmpi"], environ) == Abridged(refusal)


def test_master_port_must_be_a_port():
    assert [port(FAR["srun"], SLURM | {"MASTER_PORT": value}) for value in ("1", "65535")] == [1, 65535]
    for value in ("0", "65536", "-1", "http", "29500.0", "²"):
        assert refused(FAR["srun"], SLURM | {"MASTER_PORT": value}) == (
            f"MASTER_PORT={value}: must be a port, from 1 to 65535; unset it, and the port follows from the job"
        )


#: Two launches that may run side by side: launcher, what they share, and what only the one or the other has.
NEIGHBOURS = {
    "two jobs": ("srun", SLURM, {"SLURM_JOB_ID": "8"}, {"SLURM_JOB_ID": "9"}),
    "two steps": ("srun", SLURM, {"SLURM_STEP_ID": "1"}, {"SLURM_STEP_ID": "2"}),
    "two mpirun of a job": ("openmpi", SLURM, {"PMIX_NAMESPACE": "2067333121"}, {"PMIX_NAMESPACE": "2067333377"}),
    "an older Open MPI": ("openmpi", {}, {"OMPI_MCA_ess_base_jobid": "1"}, {"OMPI_MCA_ess_base_jobid": "2"}),
    "two jobs of MPICH": ("mpich", {}, {"SLURM_JOB_ID": "8"}, {"SLURM_JOB_ID": "9"}),
    "two mpirun of Intel MPI": ("mpich", SLURM, {"I_MPI_HYDRA_UUID": "410d"}, {"I_MPI_HYDRA_UUID": "4b0d"}),
    "LSF": ("mpich", {}, {"LSB_JOBID": "5"}, {"LSB_JOBID": "6"}),
    "an array of LSF": ("mpich", {"LSB_JOBID": "5"}, {"LSB_JOBINDEX": "1"}, {"LSB_JOBINDEX": "2"}),
    "PBS": ("mpich", {}, {"PBS_JOBID": "5[1].n0"}, {"PBS_JOBID": "5[2].n0"}),
}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_concurrent_launches_have_different_ports(name):
    launcher, shared, first, second = NEIGHBOURS[name]
    ports = {port(FAR[launcher], shared | mine) for mine in (first, second)}
    assert len(ports) == 2
    assert all(10000 <= number < 32768 for number in ports)


def test_mpirun_port_ignores_the_step_and_falls_back_to_torchs():
    assert {port(FAR["mpich"], SLURM | {"SLURM_STEP_ID": step}) for step in ("0", "1")} == {port(FAR["mpich"], SLURM)}
    for launcher in MPI:
        assert (address.launch_id(FAR[launcher], {}), port(FAR[launcher], {})) == ("", 29500)


@pytest.mark.parametrize(("kernel", "end"), [
    ("32768\t60999", 32768), ("15000 65000", 15000), ("61000 65000", 61000), ("1024 65535", 32768),
    ("", 32768), (None, 32768),
])  # fmt: skip
def test_derived_port_stays_below_the_ephemeral_ones(ephemeral, kernel, end):
    ephemeral.unlink() if kernel is None else ephemeral.write_text(kernel)
    ports = {port(FAR["srun"], SLURM | {"SLURM_JOB_ID": str(job)}) for job in range(2000)}
    assert min(ports) >= 10000
    assert end - 0.05 * (end - 10000) < max(ports) < end  # 2,000 draws come close to it


@pytest.mark.parametrize(("host", "listens"), [("127.0.0.1", "127.0.0.1"), (socket.gethostname(), "0.0.0.0")])
def test_rank_0_is_reached_by_an_address_of_others(host, listens):
    _, descriptor = address.listen(host, 0, on_all=True)
    with socket.socket(fileno=descriptor) as listener:
        assert listener.getsockname()[0] == listens
