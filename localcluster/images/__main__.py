import asyncio
import dataclasses
import sys

from localcluster import images
from localcluster.building import BuildFailed

if __name__ == "__main__":
    reason = images.lacking()
    if reason is not None:
        sys.exit(f"localcluster.images: {reason}")
    try:
        built = asyncio.run(images.images())
    except BuildFailed as error:
        sys.exit(f"localcluster.images: {error}")
    for field in dataclasses.fields(built):
        image = getattr(built, field.name)
        print(image.name, image.archive)
