"""``fed keys``: a private authority, its server's and its nodes' certificates, and the roster."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fed.cli.tables import console, listed

if TYPE_CHECKING:
    from fed.identity.authority import Authority

__all__ = ["app"]

app = typer.Typer(
    help="Say who may serve and who may report to it: a private authority, certificates, and a roster of nodes."
)

_Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The authority's folder.")]
_Node = Annotated[str, typer.Argument(metavar="NAME", help="The node's name.")]
_Hosts = Annotated[
    list[str] | None,
    typer.Option("--host", metavar="H", help="A name or an address under which nodes reach the server. Repeatable."),
]
_Days = Annotated[int, typer.Option(min=1, max=36_500, metavar="N", help="Days for which the certificate is valid.")]


@app.callback(invoke_without_command=True)
def _keys(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command("init")
def _init(folder: _Folder, hosts: _Hosts = None, days: _Days = 3650) -> None:
    """Make an authority, a certificate for its server, and an empty roster.

    Without --host the server is reached as localhost and by this machine's host name.
    """
    from fed.identity.authority import Authority

    # Typer gives an empty list where the option is left out.
    authority = Authority.create(folder, hosts=hosts or None, days=days)
    typer.echo(f"{folder}: an authority, valid until {authority.facts.expires:%Y-%m-%d}: keep it to yourself")
    typer.echo(_about_server(authority))


@app.command("issue")
def _issue(
    folder: _Folder,
    name: _Node,
    days: _Days = 365,
    peer: Annotated[bool, typer.Option("--peer", help="For fed peer: others may dial it, too.")] = False,
) -> None:
    """Give a node, or a peer, a key and a certificate, and a place on the roster."""
    authority = _load(folder)
    place = authority.issue(name, days=days, is_peer=peer)
    kind = "peer" if peer else "node"
    expires = authority.roster.entries()[name].expires
    typer.echo(f"{place}: for the {kind} {name} alone, valid until {expires:%Y-%m-%d}")


@app.command("server")
def _server(folder: _Folder, hosts: _Hosts = None, days: _Days = 365) -> None:
    """Give the server another key and certificate: before it expires, or for other hosts."""
    authority = _load(folder)
    authority.issue_server(hosts=hosts or None, days=days)
    typer.echo(_about_server(authority))


@app.command("revoke")
def _revoke(folder: _Folder, name: _Node) -> None:
    """Admit a node no more; a server that runs with this roster refuses it at once."""
    authority = _load(folder)
    entry = authority.revoke(name)
    typer.echo(f"{name}: revoked on {entry.revoked:%Y-%m-%d}")
    # The authority's key may be kept on another machine.
    if authority.identifies(name):
        typer.echo(f"the signed identities still name it: run fed keys sign {folder} where the authority's key is")


@app.command("sign")
def _sign(folder: _Folder) -> None:
    """Sign the nodes' identities anew, for secure aggregation: after a revocation without the authority's key."""
    typer.echo(f"{_load(folder).sign_identities()}: signed; copy it to the server")


@app.command("list")
def _list(folder: _Folder) -> None:
    """List the nodes that were issued certificates, and which of them are valid."""
    authority = _load(folder)
    typer.echo(f"authority: valid until {authority.facts.expires:%Y-%m-%d}")
    typer.echo(_about_server(authority))
    if not (entries := authority.roster.entries()):
        typer.echo(f"no nodes: fed keys issue {folder} NAME adds one")
        return
    rows = []
    for name, entry in entries.items():
        dates = (f"{day:%Y-%m-%d}" if day else "–" for day in (entry.issued, entry.expires, entry.revoked))
        rows.append((name, entry.status(authority.clock()), *dates, f"{entry.sha256[:16]}…"))
    console().print(listed(("node", "status", "issued", "expires", "revoked", "sha256"), rows))
    if (identities := authority.identities()) is not None:
        typer.echo(f"identities.json: version {identities.version}, of {len(identities.points)} nodes")


def _load(folder: Path) -> "Authority":
    from fed.identity.authority import Authority

    return Authority.load(folder)


def _about_server(authority: "Authority") -> str:
    facts = authority.server_facts
    place = authority.folder / "server"
    return f"{place}: for the server alone, valid until {facts.expires:%Y-%m-%d}, reached as {', '.join(facts.hosts)}"
