"""Try permitted and other hosts by URL, by name and by address; print what each led to."""

import socket
import urllib.error
import urllib.request

URLS = (
    *("http://good.test/", "http://rebind.test/", "http://rebind.test/", "http://meta.test/", "http://own.test/"),
    *("http://169.254.169.254/latest/", "http://93.184.216.34/", "http://evil.test/"),
)
for url in URLS:
    try:
        print(urllib.request.urlopen(url, timeout=5).read().decode())
    except urllib.error.HTTPError as error:
        print(error.code)
    except OSError as error:
        print(error.__class__.__name__)
for name in ("exfil-data.evil.test", "exfil-data.good.test", "good.test.evil.test"):
    try:
        socket.getaddrinfo(name, 80)
        print("resolved")
    except OSError as error:
        print(error.__class__.__name__)
for place in (("169.254.169.254", 80), ("93.184.216.34", 80), ("127.0.0.53", 53), ("10.0.0.1", 80)):
    try:
        socket.create_connection(place, timeout=1)
        print("connected")
    except OSError as error:
        print(error.__class__.__name__)
