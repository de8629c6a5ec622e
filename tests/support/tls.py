"""TLS contexts for both ends of a test connection.

``localhost.pem`` holds a key and a certificate that nobody trusts elsewhere, made by
``openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 36500
-subj /CN=localhost -addext subjectAltName=DNS:localhost,IP:127.0.0.1``.
"""

import ssl
from pathlib import Path

_PEM = Path(__file__).with_name("localhost.pem")


def server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(_PEM)
    return context


def client_context() -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(_PEM))
    # With 1.3 the server's session tickets lie unread at the client, whose close resets then.
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    return context
