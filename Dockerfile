# One image for every Berth process: `docker build -t berth .`, then `docker run berth agent --help`.
FROM python:3.11-slim-bookworm AS build
WORKDIR /src
COPY requirements/runtime.txt requirements/runtime.txt
RUN python -m venv /opt/berth \
    && /opt/berth/bin/pip install --no-cache-dir --require-hashes -r requirements/runtime.txt
COPY pyproject.toml README.md ./
COPY berth berth
COPY agent agent
COPY binder binder
COPY loader loader
COPY proxy proxy
RUN /opt/berth/bin/pip install --no-cache-dir --no-deps .

FROM python:3.11-slim-bookworm
# PID 1 must pass signals on from its first moment and reap what it did not start; Python does neither
# before it has imported its modules.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/berth /opt/berth
ENV PATH=/opt/berth/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# A number, so that Kubernetes can verify runAsNonRoot.
USER 65532:65532
ENTRYPOINT ["tini", "--", "berth"]
