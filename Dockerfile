# The image that charts/pilotfish runs: docker build -t pilotfish:0.1.0 . Nothing in CI builds it.
FROM rust:1.95-trixie AS build
WORKDIR /src
COPY . .
RUN --mount=type=cache,target=/usr/local/cargo/registry --mount=type=cache,target=/src/target \
    cargo build --locked --release --bin pilotfish && cp target/release/pilotfish /pilotfish

FROM debian:trixie-slim
# For rediss:// and tokenizer services with https.
RUN apt-get update && apt-get install --yes --no-install-recommends ca-certificates && rm -rf /var/lib/apt/lists/*
COPY --from=build /pilotfish /usr/local/bin/pilotfish
# A number: with a name the kubelet cannot tell that it is not root.
USER 65532:65532
EXPOSE 9002 9003 9090
ENTRYPOINT ["pilotfish"]
