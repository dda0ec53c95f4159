from torch import nn

from ptdbench.models.protocol import Role, roles_of
from tests.models.assembled import assembled
from tests.parallel.made import refused


def net(roles):
    return assembled(nn.Module.forward, up=nn.Linear(2, 4), roles=lambda: roles)


def test_kinds_alone_are_roles_and_invalid_ones_are_refused():
    assert roles_of(net({"up": "colwise", "": Role("scatter")})) == {"up": Role("colwise"), "": Role("scatter")}
    first, second = refused(roles_of, net({"up": "outputs", "down": "rowwise"})).splitlines()
    assert first.startswith("roles()['up']=outputs: is not a role; try colwise, rowwise, vocabulary")
    assert second == "roles()['down']=rowwise: the model has no module of this name"
