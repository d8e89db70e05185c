"""Which architectures there are, by family, and how to get one of them."""

from collections.abc import Callable
from dataclasses import dataclass

from zoo.specimen import Specimen

FAMILIES = ("transformers", "torchvision", "timm", "diffusers")


@dataclass(frozen=True)
class Family:
    """A package of models."""

    names: Callable[[], list[str]]
    specimen: Callable[[str], Specimen]


def family(name: str) -> Family:
    """Loads the package only when it is asked for: each takes seconds."""
    from zoo import extras

    extras.load()
    if name == "transformers":
        from zoo import hugging_face

        return Family(lambda: list(hugging_face.architectures()), hugging_face.specimen)
    if name == "diffusers":
        from zoo import diffusion

        return Family(lambda: list(diffusion.ARCHITECTURES), diffusion.specimen)
    from zoo import pictures

    if name == "timm":
        return Family(pictures.timm_names, pictures.timm_specimen)
    return Family(pictures.torchvision_names, pictures.torchvision_specimen)
