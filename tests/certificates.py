"""A certificate authority of a test, and the PEM files of what it signs."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Pair(NamedTuple):
    """Files of a certificate and its key."""

    certificate: Path
    key: Path


class Authority:
    """ca: file of its own certificate."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder, self._key = folder, ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = self._builder(self._name, self._key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        certificate = builder.add_extension(usage, critical=True).sign(self._key, hashes.SHA256())
        self.ca = folder / f"{name}.pem"
        self.ca.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def signs(self, name: str, *hosts: str) -> Pair:
        """A certificate under `name`, of localhost and 127.0.0.1 unless hosts are given, in files that are replaced."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), key.public_key())
        named: list[x509.GeneralName] = [x509.DNSName(host) for host in hosts or ("localhost",)]
        named += [] if hosts else [x509.IPAddress(ip_address("127.0.0.1"))]
        builder = builder.add_extension(x509.SubjectAlternativeName(named), critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        pair = Pair(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        for file, content in zip(pair, (certificate.public_bytes(serialization.Encoding.PEM), key.private_bytes(*form)), strict=True):
            written = file.with_suffix(".new")
            written.write_bytes(content)
            os.replace(written, file)
        return pair

    def revokes(self, pair: Pair) -> bytes:
        """A list of revoked certificates that has only this one, in PEM."""
        serial, now = x509.load_pem_x509_certificate(pair.certificate.read_bytes()).serial_number, datetime.now(UTC)
        revoked = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now).build()
        builder = x509.CertificateRevocationListBuilder(self._name, now - timedelta(days=1), now + timedelta(days=1), [], [revoked])
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def _builder(self, name: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        valid = datetime.now(UTC) - timedelta(days=1), datetime.now(UTC) + timedelta(days=1)
        builder = x509.CertificateBuilder(self._name, name, key, x509.random_serial_number(), *valid)
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        own = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return builder.add_extension(own, critical=False)
