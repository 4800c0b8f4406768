from support.faiss_threads import one_thread

__all__ = ["one_thread"]
