import contextlib, os, sys, warnings
sys.path.insert(0, sys.argv[1])
warnings.simplefilter("ignore")
from ringfence import Sandbox, Secret
from ringfence_attacks import tls_server
from ringfence.gateway.secrets.ca import Authority

authority, value = Authority(), "sk-" + os.urandom(12).hex()
with tls_server._known(authority), contextlib.closing(tls_server.Echo(authority)) as server:
    policy = tls_server.policy(server, Secret("TOKEN", value, hosts=[tls_server.HOST]))
    with Sandbox(policy=policy) as box:
        command = f'curl -sS -H "Authorization: $TOKEN" https://{tls_server.HOST}:{server.port}/'
        result = box.exec(["sh", "-c", command])
    print(os.geteuid() != 0, result.status, value.encode() in server.heard, value in result.stdout, result.stderr)
