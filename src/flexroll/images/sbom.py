"""Software bill of materials of an image: CycloneDX 1.6, JSON, Python and Debian packages."""

from __future__ import annotations

from typing import Any

from flexroll import __version__


def bill_of_materials(name: str, digest: str, contents: dict[str, Any]) -> str:
    """The document as JSON text.

    Args:
        contents: what `flexroll.images.selftest` printed inside the image.
    """
    from cyclonedx.factory.license import LicenseFactory
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import Component, ComponentType
    from cyclonedx.output.json import JsonV1Dot6
    from packageurl import PackageURL

    licenses = LicenseFactory()
    bom = Bom()
    bom.metadata.component = Component(
        type=ComponentType.CONTAINER, name=f"flexroll/{name}", version=digest, bom_ref=digest
    )
    bom.metadata.tools.components.add(Component(type=ComponentType.APPLICATION, name="flexroll", version=__version__))
    seen = set()
    for kind, rows in (("pypi", contents["packages"]), ("deb", contents["debian"])):
        for row in rows:
            url = PackageURL(
                type=kind,
                namespace="debian" if kind == "deb" else None,
                name=row["name"].lower().replace("_", "-") if kind == "pypi" else row["name"],
                version=row["version"],
                qualifiers={"arch": row["arch"]} if kind == "deb" else None,
            )
            if url.to_string() in seen:
                continue
            seen.add(url.to_string())
            component = Component(
                type=ComponentType.LIBRARY,
                name=row["name"],
                version=row["version"],
                purl=url,
                bom_ref=url.to_string(),
                licenses=[licenses.make_from_string(row["license"])] if row.get("license") else None,
            )
            bom.components.add(component)
            bom.register_dependency(bom.metadata.component, [component])
    return JsonV1Dot6(bom).output_as_string(indent=1) + "\n"
