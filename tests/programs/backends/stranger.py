from ringfence.backends.contract import BackendReport, Finding  # noqa: F401  # for tests that put it into doctor()


class Backend:
    name = "strange"
    isolation = "own-kernel"

    def facts(self):
        raise NotImplementedError("facts")

    def plan(self, policy, image, facts):
        raise NotImplementedError("plan")

    def launch(self, plan, *, controls=None):
        raise NotImplementedError("launch")

    def doctor(self):
        raise NotImplementedError('doctor')
