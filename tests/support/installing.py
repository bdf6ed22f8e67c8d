"""A test's own plugins as installed packages."""

from __future__ import annotations


def install_plugin(folder, name, source):
    """Install a package in ``folder`` whose plugin is the class ``Plugin`` of its source.

    Returns:
        The environment of a Python that finds the package.
    """
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[llmaas_plugins]\n{name} = {name}:Plugin\n")
    (folder / f"{name}.py").write_text(source)
    return {"PYTHONPATH": str(folder)}
