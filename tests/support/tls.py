"""TLS contexts for both ends of a test connection.

``localhost.pem`` holds a key and a certificate that nobody trusts elsewhere, made by
``openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 36500
-subj /CN=localhost -addext subjectAltName=DNS:localhost,IP:127.0.0.1``.
"""

import ssl
from pathlib import Path

#: The path of both.
PEM = Path(__file__).with_name("localhost.pem")

VERSIONS = {"tls12": ssl.TLSVersion.TLSv1_2, "tls13": ssl.TLSVersion.TLSv1_3}


def server_context(version: str | None = None) -> ssl.SSLContext:
    """Of one of the ``VERSIONS``, or of any."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(PEM)
    if version is not None:
        context.minimum_version = context.maximum_version = VERSIONS[version]
    return context


def client_context(version: str = "tls12") -> ssl.SSLContext:
    """Of one of the ``VERSIONS``.

    With 1.3 the server's session tickets lie unread at a client that reads nothing, whose
    close resets then.
    """
    context = ssl.create_default_context(cafile=str(PEM))
    context.minimum_version = context.maximum_version = VERSIONS[version]
    return context
